"""Token embedding and output head, both split over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.embedding import embedding
from services.engine.checkpoints.loader import WeightReader, even_part
from services.engine.layers.linear import Linear
from services.engine.models.base import Collectives
from services.engine.runtime.batch import StepBatch

# Legend: T tokens, N rows that need logits, H hidden.


@dataclass(frozen=True, slots=True)
class TokenEmbedding:
    """Tokens of a batch to fp32 [T, H], images in their places; a rank holds an even share."""

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

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        rows_TH = self.rows(batch.token_ids_T)
        if batch.images is None:
            return rows_TH
        return rows_TH.index_copy_(0, batch.images.rows_R, batch.images.values_RH.float())

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Embeddings fp32 [T, H] of ids int64 [T] alone."""
        rows = embedding(ids_T, self.table, self.first_row).float()
        return self.collectives.all_reduce(rows)


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """Tokens of a batch to `streams` equal residual streams behind each other: [T, streams * H]."""

    embedding: TokenEmbedding
    streams: int
    dtype: torch.dtype

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        return self.embedding(batch).to(self.dtype).repeat(1, self.streams)


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
