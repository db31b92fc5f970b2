"""Linear layers that know how they split over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.quant_linear import Matrix, linear
from services.engine.checkpoints.loader import WeightReader, even_part
from services.engine.checkpoints.tensors import Slice
from services.engine.models.base import Collectives

# Legend: T tokens, N outputs, K inputs.


@dataclass(frozen=True, slots=True)
class Linear:
    """x [T, K] to [T, N of this rank]. Replicated, or split by outputs."""

    weight: Matrix

    @classmethod
    def replicated(cls, reader: WeightReader, name: str, shape: tuple[int, int]) -> Linear:
        """Every rank holds the whole."""
        return cls(reader.matrix(name, shape))

    @classmethod
    def by_outputs(
        cls, reader: WeightReader, name: str, shape: tuple[int, int], *segments: int
    ) -> Linear:
        """Each rank holds its even share of the outputs, of every segment of them."""
        part = even_part(reader.shard, 0, *(segments or (shape[0],)), what=name)
        return cls(reader.matrix(name, shape, part))

    @classmethod
    def of_part(
        cls, reader: WeightReader, name: str, shape: tuple[int, int], part: Slice | None
    ) -> Linear:
        """Each rank holds `part` of the outputs."""
        return cls(reader.matrix(name, shape, part))

    def __call__(self, x_TK: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return linear(x_TK, self.weight, out_dtype)


@dataclass(frozen=True, slots=True)
class RowLinear:
    """x [T, K of this rank] to [T, N]: split by inputs, summed over ranks in fp32."""

    weight: Matrix
    collectives: Collectives

    @classmethod
    def by_inputs(
        cls, reader: WeightReader, name: str, shape: tuple[int, int], collectives: Collectives
    ) -> RowLinear:
        """Each rank holds its even share of the inputs."""
        part = even_part(reader.shard, 1, shape[1], what=name)
        return cls(reader.matrix(name, shape, part), collectives)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """fp32 [T, N], equal on every rank."""
        return self.collectives.all_reduce(self.partial(x_TK))

    def partial(self, x_TK: torch.Tensor) -> torch.Tensor:
        """fp32 [T, N]: this rank's summand."""
        return linear(x_TK, self.weight, torch.float32)
