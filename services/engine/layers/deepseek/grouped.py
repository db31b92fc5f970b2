"""Low-rank output projection whose first half is block-diagonal."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kernels.humming.select import row_parts
from kernels.quant_linear import (
    Fp8BlockMatrix,
    HummingMatrix,
    Int4Matrix,
    Matrix,
    Mxfp4Matrix,
    PlainMatrix,
    linear,
)
from services.engine.checkpoints.loader import WeightReader, even_part, even_share
from services.engine.layers.linear import RowLinear
from services.engine.models.base import Collectives

# Legend: T tokens, G groups of this rank, R rank of a group, K inputs of a group.


@dataclass(frozen=True, slots=True)
class GroupedOutput:
    """Heads [T, G * K] to fp32 [T, hidden]: z_g = A_g x_g, then B concat(z).

    Groups are split over ranks, one sum over ranks. Source: DeepSeek-V4 output projection.
    """

    a: tuple[Matrix, ...]  # G matrices [R, K]
    b: RowLinear

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        *,
        groups: int,
        rank: int,
        group_inputs: int,
        hidden: int,
        collectives: Collectives,
    ) -> GroupedOutput:
        """Read `wo_a` [groups * rank, group_inputs] and `wo_b` [hidden, groups * rank]."""
        held = even_share(groups, reader.shard.world, "o_groups")
        rows = groups * rank
        part = even_part(reader.shard, 0, rows, what="o_groups")
        a = reader.matrix("wo_a", (rows, group_inputs), part)
        b = RowLinear.by_inputs(reader, "wo_b", (hidden, rows), collectives)
        return cls(rows_in_parts(a, held), b)

    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor:
        parts = x_TX.chunk(len(self.a), dim=1)
        z = [linear(x.contiguous(), a) for x, a in zip(parts, self.a, strict=True)]
        return self.b(torch.cat(z, dim=1))


def rows_in_parts(matrix: Matrix, parts: int) -> tuple[Matrix, ...]:
    """Equal runs of a matrix' rows, in stored form.

    Where a run cuts blocks of FP8 scales, the scale's rows are repeated for smaller blocks.
    """
    match matrix:
        case PlainMatrix(data):
            return tuple(PlainMatrix(rows) for rows in data.chunk(parts))
        case Fp8BlockMatrix(codes, scale, block_n):
            fine = math.gcd(codes.shape[0] // parts, block_n)
            scale = scale.repeat_interleave(block_n // fine, 0)[: codes.shape[0] // fine].clone()
            pairs = zip(codes.chunk(parts), scale.chunk(parts), strict=True)
            return tuple(replace(matrix, codes=c, scale=s, block_n=fine) for c, s in pairs)
        case HummingMatrix():
            return row_parts(matrix, parts)
        case Int4Matrix() | Mxfp4Matrix():
            raise TypeError(f"{type(matrix).__name__} is not stored in groups of rows")
