"""Engram: rows of an n-gram table gate into every residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.engram import decode_rows, engram_gate
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.deepseek41.context import SharingContext
from services.engine.layers.linear import Linear

# Legend: T tokens, n streams, D hidden, E values of all rows of a token.


@dataclass(frozen=True, slots=True)
class EngramConfig:
    """`heads` rows of `row_values` values per token; `eps` of the norms in the gate."""

    hidden: int
    streams: int
    heads: int
    row_values: int
    eps: float


@dataclass(frozen=True, slots=True)
class EngramLayer:
    """Adds gated n-gram values to the streams; nothing for tokens of images. On every rank whole.

    The matrix gives a key per stream, then the value that all share.
    """

    config: EngramConfig
    table: str  # name of the n-gram table
    kv: Linear
    q_nD: torch.Tensor
    k_nD: torch.Tensor

    @classmethod
    def load(cls, reader: WeightReader, config: EngramConfig, table: str) -> EngramLayer:
        """Read `wkv`, `q_weight` and `k_weight`; the table's rows come with each batch."""
        c = config
        shape = ((c.streams + 1) * c.hidden, c.heads * c.row_values)
        return cls(
            config=config,
            table=table,
            kv=Linear.replicated(reader, "wkv", shape),
            q_nD=reader.tensor("q_weight", (c.streams, c.hidden)),
            k_nD=reader.tensor("k_weight", (c.streams, c.hidden)),
        )

    def __call__(self, x_TnD: torch.Tensor, ctx: SharingContext) -> torch.Tensor:
        """[T, n, D] of the type of the streams; waits for the table rows of the batch."""
        c = self.config
        e_TE = decode_rows(ctx.ngram_rows(self.table), c.heads).to(x_TnD.dtype)
        kv = self.kv(e_TE)
        keys_TnD = kv[:, : c.streams * c.hidden].unflatten(1, (c.streams, c.hidden))
        value_TD = kv[:, c.streams * c.hidden :]
        out_TnD = engram_gate(
            x_TnD, keys_TnD, value_TD, self.q_nD, self.k_nD, ctx.is_image_T, eps=c.eps
        )
        return out_TnD.to(x_TnD.dtype)
