"""Matrices without quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.quant_linear import Matrix, PlainMatrix
from services.engine.checkpoints.formats.base import all_of, joined_rows
from services.engine.checkpoints.tensors import FLOAT_DTYPES, Slice, TensorReader


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """bf16, fp16 or fp32 under `<module>.weight`."""

    def matches(self, tensors: TensorReader, module: str) -> bool:
        return True

    def check(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> tuple[str, ...]:
        name = f"{module}.weight"
        tensors.expect(name, shape, FLOAT_DTYPES)
        return (name,)

    def read(
        self, tensors: TensorReader, module: str, shape: tuple[int, int], part: Slice | None
    ) -> Matrix:
        return PlainMatrix(tensors.read(f"{module}.weight", part))

    def stack(self, matrices: Sequence[Matrix], joined: int, name: str) -> Matrix:
        return PlainMatrix(joined_rows([m.data for m in all_of(PlainMatrix, matrices)], joined))
