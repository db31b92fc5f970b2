"""Four-bit integer matrices: compressed-tensors "pack-quantized" and AutoAWQ "gemm".

Sources: compressed_tensors.compressors.pack_quantized, awq.utils.packing_utils.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.quant_linear import (
    Int4Matrix,
    Matrix,
    from_auto_awq,
    from_compressed_tensors,
    zeros_of_compressed_tensors,
)
from services.common.checkpoint import CheckpointError
from services.engine.checkpoints.formats.base import all_of, check_scales, in_units, joined_rows
from services.engine.checkpoints.tensors import FLOAT_DTYPES, Slice, TensorReader

GROUPS = (32, 64, 128)  # inputs that a scale may cover
WORD = 8  # codes of an int32
LARGEST = 15.0  # code minus zero point


@dataclass(frozen=True, slots=True)
class CompressedTensorsFormat:
    """`<module>.weight_packed` I32 [N, K / 8] with `weight_scale` [N, K / g] and `weight_shape`.

    Asymmetric with `weight_zero_point` I32 [N / 8, K / g], packed along N. A `weight_g_idx` is
    taken where it says k // g. `groups` are the group sizes that the config gives, and
    `asymmetric` whether it says that every matrix has zero points.
    """

    groups: tuple[int, ...] = GROUPS
    asymmetric: bool = False

    def matches(self, tensors: TensorReader, module: str) -> bool:
        names = ("weight_packed", "weight_shape", "weight_zero_point")
        return any(f"{module}.{name}" in tensors for name in names)

    def check(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> tuple[str, ...]:
        rows, inputs = shape
        packed, scale = f"{module}.weight_packed", f"{module}.weight_scale"
        tensors.expect(packed, (rows, -(-inputs // WORD)), ("I32",))
        group = self._group(tensors, module, shape)
        tensors.expect(scale, (rows, inputs // group), FLOAT_DTYPES)
        tensors.expect(f"{module}.weight_shape", (2,), ("I64", "I32"))
        names = [packed, scale, f"{module}.weight_shape"]
        zero, order = f"{module}.weight_zero_point", f"{module}.weight_g_idx"
        if self.asymmetric or zero in tensors:
            tensors.expect(zero, (-(-rows // WORD), inputs // group), ("I32",))
            names.append(zero)
        if order in tensors:
            tensors.expect(order, (inputs,), ("I32", "I64"))
            names.append(order)
        return tuple(names)

    def read(
        self, tensors: TensorReader, module: str, shape: tuple[int, int], part: Slice | None
    ) -> Matrix:
        rows, inputs = shape
        group = self._group(tensors, module, shape)
        self._check_values(tensors, module, shape, group)
        packed, scale = tensors.info(f"{module}.weight_packed"), f"{module}.weight_scale"
        groups = in_units(part, 1, group, packed, inputs)
        words = tensors.read(packed.name, in_units(part, 1, WORD, packed, inputs))
        factors = tensors.read(scale, groups)
        check_scales(factors, LARGEST, tensors.info(scale))
        zero = None
        if f"{module}.weight_zero_point" in tensors:
            zero = zeros_of_compressed_tensors(tensors.read(f"{module}.weight_zero_point"), rows)
            zero = zero if groups is None else groups.of(zero)
        return from_compressed_tensors(words, factors, zero, group)

    def stack(self, matrices: Sequence[Matrix], joined: int, name: str) -> Matrix:
        return stack_int4(matrices, joined)

    def _group(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> int:
        return group_of(
            tensors,
            f"{module}.weight_scale",
            self.groups,
            shape[1],
            lambda count: (shape[0], count),
        )

    def _check_values(
        self, tensors: TensorReader, module: str, shape: tuple[int, int], group: int
    ) -> None:
        said = tensors.info(f"{module}.weight_shape")
        if (value := tuple(tensors.read(said.name).tolist())) != shape:
            raise CheckpointError(
                f"says {list(value)}, the config gives {list(shape)}",
                file=said.file,
                tensor=said.name,
            )
        if f"{module}.weight_g_idx" not in tensors:
            return
        order = tensors.info(f"{module}.weight_g_idx")
        if not torch.equal(tensors.read(order.name).long(), torch.arange(shape[1]) // group):
            raise CheckpointError(
                f"inputs in an order of activations are not served, only groups of {group} "
                "neighbours",
                file=order.file,
                tensor=order.name,
            )


@dataclass(frozen=True, slots=True)
class AutoAwqFormat:
    """`<module>.qweight` I32 [K, N / 8], `qzeros` I32 [K / g, N / 8] and `scales` [K / g, N].

    Nibble i of a word holds column (0, 2, 4, 6, 1, 3, 5, 7)[i] of eight. `asymmetric` False says
    that the config has no zero points: then a matrix without `qzeros` has 8 throughout.
    """

    groups: tuple[int, ...] = GROUPS
    asymmetric: bool = True

    def matches(self, tensors: TensorReader, module: str) -> bool:
        return any(f"{module}.{name}" in tensors for name in ("qweight", "qzeros", "scales"))

    def check(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> tuple[str, ...]:
        rows, inputs = shape
        weight, zeros, scales = (f"{module}.{name}" for name in ("qweight", "qzeros", "scales"))
        if rows % WORD:
            raise CheckpointError(f"{rows} outputs are no multiple of {WORD}", tensor=weight)
        tensors.expect(weight, (inputs, rows // WORD), ("I32",))
        group = self._group(tensors, module, shape)
        tensors.expect(scales, (inputs // group, rows), FLOAT_DTYPES)
        if not self.asymmetric and zeros not in tensors:
            return (weight, scales)
        tensors.expect(zeros, (inputs // group, rows // WORD), ("I32",))
        return (weight, scales, zeros)

    def read(
        self, tensors: TensorReader, module: str, shape: tuple[int, int], part: Slice | None
    ) -> Matrix:
        rows, inputs = shape
        group = self._group(tensors, module, shape)
        weight, scales = tensors.info(f"{module}.qweight"), f"{module}.scales"
        words = transposed(in_units(part, 0, WORD, weight, rows, "packed word"))
        groups = in_units(part, 1, group, weight, inputs)
        group_words = transposed(in_units(groups, 0, WORD, weight, rows, "packed word"))
        factors = tensors.read(scales, transposed(groups))
        check_scales(factors, LARGEST, tensors.info(scales))
        zeros = f"{module}.qzeros"
        return from_auto_awq(
            tensors.read(weight.name, words),
            factors,
            tensors.read(zeros, group_words) if zeros in tensors else None,
            group,
        )

    def stack(self, matrices: Sequence[Matrix], joined: int, name: str) -> Matrix:
        return stack_int4(matrices, joined)

    def _group(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> int:
        return group_of(
            tensors, f"{module}.scales", self.groups, shape[1], lambda count: (count, shape[0])
        )


def transposed(part: Slice | None) -> Slice | None:
    """`part` of the transpose of a matrix."""
    return None if part is None else Slice(1 - part.dim, part.ranges)


def group_of(
    tensors: TensorReader,
    scale: str,
    groups: tuple[int, ...],
    inputs: int,
    shape_of: Callable[[int], tuple[int, int]],
) -> int:
    """The size among `groups` whose number of groups gives the stored shape of `scale`.

    CheckpointError where `scale` is missing or has none of these shapes.
    """
    shapes = {group: shape_of(inputs // group) for group in groups if inputs % group == 0}
    if not shapes:
        raise CheckpointError(f"{inputs} inputs are no multiple of {list(groups)}", tensor=scale)
    if scale in tensors:
        for group, shape in shapes.items():
            if tensors.info(scale).shape == shape:
                return group
    group, shape = next(iter(shapes.items()))
    tensors.expect(scale, shape, FLOAT_DTYPES)
    return group


def stack_int4(matrices: Sequence[Matrix], joined: int) -> Int4Matrix:
    """Stacks of codes, scales and zero points."""
    chosen = all_of(Int4Matrix, matrices)
    zeros = [m.zero for m in chosen if m.zero is not None]
    return Int4Matrix(
        joined_rows([m.codes for m in chosen], joined),
        joined_rows([m.scale for m in chosen], joined),
        joined_rows(zeros, joined) if zeros else None,
        chosen[0].group,
    )
