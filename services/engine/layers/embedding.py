"""Token embedding and output head, both split over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.embedding import embedding
from services.engine.checkpoints.loader import WeightReader, even_part
from services.engine.layers.linear import Linear
from services.engine.models.base import Collectives

# Legend: T tokens, N rows that need logits, H hidden.


@dataclass(frozen=True, slots=True)
class TokenEmbedding:
    """ids int64 [T] to fp32 [T, H]; each rank holds an even share of the rows."""

    table: torch.Tensor
    first_row: int
    collectives: Collectives

    @classmethod
    def load(
        cls, reader: WeightReader, name: str, vocab: int, hidden: int, collectives: Collectives
    ) -> TokenEmbedding:
        part = even_part(reader.shard, 0, vocab, what=name)
        table = reader.tensor(f"{name}.weight", (vocab, hidden), part)
        return cls(table, part.ranges[0][0] if part else 0, collectives)

    def __call__(self, ids_T: torch.Tensor) -> torch.Tensor:
        rows = embedding(ids_T, self.table, self.first_row).float()
        return self.collectives.all_reduce(rows)


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Hidden states [N, H] to fp32 logits [N, vocab], gathered from all ranks."""

    linear: Linear
    collectives: Collectives

    @classmethod
    def load(
        cls, reader: WeightReader, name: str, vocab: int, hidden: int, collectives: Collectives
    ) -> OutputHead:
        return cls(Linear.by_outputs(reader, name, (vocab, hidden)), collectives)

    def __call__(self, x_NH: torch.Tensor) -> torch.Tensor:
        return self.collectives.all_gather(self.linear(x_NH, torch.float32), dim=-1)
