"""OCP MXFP4 matrices: e2m1 codes with an e8m0 scale for 32 of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.quant_linear import Matrix, Mxfp4Matrix
from services.common.checkpoint import CheckpointError
from services.engine.checkpoints.formats.base import (
    all_of,
    check_scales,
    in_units,
    joined_rows,
    scale_name,
)
from services.engine.checkpoints.tensors import Slice, TensorReader

GROUP = 32
CODE_DTYPES = ("I8", "U8", "F4")
E2M1_MAX = 6.0


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """`<module>.weight` I8 or U8 [N, K / 2] and e8m0 [N, K / 32] beside it.

    The scale is named as for FP8 blocks. The low half of byte j is k = 2 j. A weight of type F4
    has the shape [N, K] and equal bytes.
    """

    def matches(self, tensors: TensorReader, module: str) -> bool:
        weight = f"{module}.weight"
        return weight in tensors and tensors.info(weight).dtype in CODE_DTYPES

    def check(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> tuple[str, ...]:
        weight, scale = f"{module}.weight", scale_name(tensors, module)
        rows, inputs = shape
        if inputs % GROUP:
            raise CheckpointError(f"{inputs} inputs are no multiple of {GROUP}", tensor=weight)
        pairs = tensors.info(weight).dtype != "F4"
        tensors.expect(weight, (rows, inputs // 2) if pairs else shape, CODE_DTYPES)
        tensors.expect(scale, (rows, inputs // GROUP), ("F8_E8M0", "U8"))
        return (weight, scale)

    def read(
        self, tensors: TensorReader, module: str, shape: tuple[int, int], part: Slice | None
    ) -> Matrix:
        weight = tensors.info(f"{module}.weight")
        scale = tensors.info(scale_name(tensors, module))
        groups = in_units(part, 1, GROUP, weight, shape[1])
        codes = tensors.read(weight.name, in_units(part, 1, 2, weight, shape[1]))
        factors = tensors.read(scale.name, groups)
        check_scales(factors, E2M1_MAX, scale)
        return Mxfp4Matrix(codes.view(torch.uint8), factors)

    def stack(self, matrices: Sequence[Matrix], joined: int, name: str) -> Matrix:
        chosen = all_of(Mxfp4Matrix, matrices)
        codes = joined_rows([m.codes for m in chosen], joined)
        return Mxfp4Matrix(codes, joined_rows([m.scale for m in chosen], joined))
