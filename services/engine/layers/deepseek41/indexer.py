"""Index sources: layers that choose entries for themselves and for the layers after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.cache_rows import rounded
from kernels.lightning_index import select_candidates, select_entries
from kernels.rotary import rotate_tail_pairs
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.deepseek41.context import SharingContext
from services.engine.layers.deepseek41.source import SharedCache
from services.engine.layers.linear import Linear

# Legend: T tokens, H index heads, D index head dim, S = top_k.

# A layer may choose the candidate blocks of later ones, be limited to them, or neither.
CandidateRole = Literal["none", "source", "limited"]


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """`heads` queries of width `head_dim`; `top_k` entries, `top_blocks` of `block` entries."""

    hidden: int
    query_rank: int
    heads: int
    head_dim: int
    top_k: int
    top_blocks: int
    block: int


@dataclass(frozen=True, slots=True)
class IndexSource:
    """Low-rank queries and x to the entries that tokens attend to. On every rank whole."""

    config: IndexConfig
    cache: SharedCache
    role: CandidateRole
    query: Linear
    weights: Linear

    @classmethod
    def load(
        cls, reader: WeightReader, config: IndexConfig, cache: SharedCache, role: CandidateRole
    ) -> IndexSource:
        """Read the query part of `indexer`."""
        c, indexer = config, reader.at("indexer")
        return cls(
            config=config,
            cache=cache,
            role=role,
            query=Linear.replicated(indexer, "wq_b", (c.heads * c.head_dim, c.query_rank)),
            weights=Linear.replicated(indexer, "weights_proj", (c.heads, c.hidden)),
        )

    def __call__(self, qr: torch.Tensor, x: torch.Tensor, ctx: SharingContext) -> None:
        """Publish int64 [T, top_k], ascending, -1 behind the last; and candidates, of a source."""
        c, angles, keys = self.config, ctx.compressed_angles, self.cache.keys(ctx)
        q_THD = self.query(qr).view(-1, c.heads, c.head_dim)
        q_THD = rounded(rotate_tail_pairs(q_THD, angles.cos_TF, angles.sin_TF), keys.form)
        weights_TH = self.weights(x).float() * (c.head_dim**-0.5 * c.heads**-0.5)
        visible_T = ctx.visible(self.cache.ratio)
        scored = (q_THD, weights_TH, keys.pool, keys.pages, ctx.sequence_T, visible_T)
        limit = ctx.carry.candidates if self.role == "limited" else None
        ctx.carry.selected_TS = select_entries(
            *scored, top_k=c.top_k, candidates=limit, form=keys.form
        )
        if self.role == "source":
            ctx.carry.candidates = select_candidates(
                *scored, size=c.block, top_blocks=c.top_blocks, form=keys.form
            )
