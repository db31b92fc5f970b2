"""e4m3 matrices with one multiplier per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.quant_linear import Fp8BlockMatrix, Matrix
from services.common.checkpoint import CheckpointError
from services.engine.checkpoints.formats.base import (
    SCALE_SUFFIXES,
    all_of,
    check_scales,
    in_units,
    joined_rows,
    scale_name,
)
from services.engine.checkpoints.tensors import FLOAT_DTYPES, Slice, TensorReader

SCALE_DTYPES = (*FLOAT_DTYPES, "F8_E8M0", "U8")
E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Fp8BlockFormat:
    """e4m3 under `<module>.weight`, multipliers [ceil(N / block_n), ceil(K / block_k)].

    The multipliers, under `<module>.weight_scale_inv` or `<module>.scale`, are floats or e8m0
    codes, which stay bytes.
    """

    block_n: int = 128
    block_k: int = 128

    def matches(self, tensors: TensorReader, module: str) -> bool:
        weight = f"{module}.weight"
        if weight in tensors and tensors.info(weight).dtype == "F8_E4M3":
            return True
        return f"{module}{SCALE_SUFFIXES[0]}" in tensors

    def check(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> tuple[str, ...]:
        weight, scale = f"{module}.weight", scale_name(tensors, module)
        tensors.expect(weight, shape, ("F8_E4M3",))
        grid = (-(-shape[0] // self.block_n), -(-shape[1] // self.block_k))
        tensors.expect(scale, grid, SCALE_DTYPES)
        return (weight, scale)

    def read(
        self, tensors: TensorReader, module: str, shape: tuple[int, int], part: Slice | None
    ) -> Matrix:
        weight, scale = f"{module}.weight", scale_name(tensors, module)
        info = tensors.info(weight)
        blocks = in_units(part, 0, self.block_n, info, shape[0])
        blocks = in_units(blocks, 1, self.block_k, info, shape[1])
        codes = tensors.read(weight, part).view(torch.uint8)
        factors = tensors.read(scale, blocks)
        check_scales(factors, E4M3_MAX, tensors.info(scale))
        return Fp8BlockMatrix(codes, factors, self.block_n, self.block_k)

    def stack(self, matrices: Sequence[Matrix], joined: int, name: str) -> Matrix:
        blocks = all_of(Fp8BlockMatrix, matrices)
        if joined > 1 and blocks[0].out_features % self.block_n:
            raise CheckpointError(
                f"{blocks[0].out_features} rows of an expert are no multiple of the quantisation "
                f"block of {self.block_n}",
                tensor=name,
            )
        codes = joined_rows([m.codes for m in blocks], joined)
        scale = joined_rows([m.scale for m in blocks], joined)
        return Fp8BlockMatrix(codes, scale, self.block_n, self.block_k)
