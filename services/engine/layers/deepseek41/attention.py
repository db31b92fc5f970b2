"""Latent attention of DeepSeek-V4.1: a window of its own and entries of a source layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.paged_attention import write_pages
from kernels.rotary import rotate_tail_pairs
from kernels.sparse_attention import Entries, Rows, sparse_attention
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader, even_part, even_share
from services.engine.layers.context import STATE_GROUP
from services.engine.layers.deepseek.context import WINDOW_GROUP
from services.engine.layers.deepseek.grouped import GroupedOutput
from services.engine.layers.deepseek.rows import row_tensor, stored
from services.engine.layers.deepseek41.context import SharingContext
from services.engine.layers.deepseek41.indexer import CandidateRole, IndexConfig, IndexSource
from services.engine.layers.deepseek41.source import CacheForms, SharedCache, SourceLayer
from services.engine.layers.linear import Linear
from services.engine.layers.norm import RmsNorm
from services.engine.models.base import Collectives

# Legend: T tokens, H query heads of this rank, D head dim.


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Head counts and widths, all ranks together."""

    hidden: int
    heads: int
    head_dim: int
    query_rank: int
    output_groups: int
    output_rank: int
    eps: float
    index: IndexConfig
    forms: CacheForms


@dataclass(frozen=True, slots=True)
class AttentionRole:
    """What a layer is to the others: whose entries it reads, and what it publishes."""

    cache: SharedCache | None = None  # None attends to the window alone
    is_source: bool = False  # fills `cache`
    is_index_source: bool = False
    candidates: CandidateRole = "none"


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """x [T, hidden] to fp32 [T, hidden]; query heads are split over ranks, keys are not."""

    name: str  # of its cache tensors
    config: AttentionConfig
    heads: int  # of this rank
    q_a: Linear
    q_norm: RmsNorm
    q_b: Linear
    kv: Linear
    kv_norm: RmsNorm
    sinks_H: torch.Tensor
    out: GroupedOutput
    cache: SharedCache | None
    source: SourceLayer | None
    indexer: IndexSource | None

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        name: str,
        config: AttentionConfig,
        role: AttentionRole,
        collectives: Collectives,
    ) -> SharedAttention:
        c, cache = config, role.cache
        sinks = even_part(reader.shard, 0, c.heads, what="num_attention_heads")
        source = indexer = None
        if cache is not None and role.is_source:
            source = SourceLayer.load(reader, cache, c.hidden, c.eps)
        if cache is not None and role.is_index_source:
            indexer = IndexSource.load(reader, c.index, cache, role.candidates)
        return cls(
            name=name,
            config=config,
            heads=even_share(c.heads, reader.shard.world, "num_attention_heads"),
            q_a=Linear.replicated(reader, "wq_a", (c.query_rank, c.hidden)),
            q_norm=RmsNorm.load(reader, "q_norm", c.query_rank, c.eps, zero_centred=False),
            q_b=Linear.by_outputs(reader, "wq_b", (c.heads * c.head_dim, c.query_rank)),
            kv=Linear.replicated(reader, "wkv", (c.head_dim, c.hidden)),
            kv_norm=RmsNorm.load(reader, "kv_norm", c.head_dim, c.eps, zero_centred=False),
            sinks_H=reader.tensor("attn_sink", (c.heads,), sinks).float(),
            out=GroupedOutput.load(
                reader,
                groups=c.output_groups,
                rank=c.output_rank,
                group_inputs=c.heads // c.output_groups * c.head_dim,
                hidden=c.hidden,
                collectives=collectives,
            ),
            cache=cache,
            source=source,
            indexer=indexer,
        )

    def cache_tensors(self, dtype: torch.dtype) -> Mapping[str, tuple[CacheTensor, ...]]:
        """Cache tensors by group; plain rows are of type `dtype`."""
        c = self.config
        row = row_tensor(self._window, c.head_dim, dtype, c.forms.window)
        tensors: dict[str, tuple[CacheTensor, ...]] = {WINDOW_GROUP: (row,)}
        if self.source is not None:
            tensors[self.source.cache.group] = self.source.cache.tensors(dtype)
            tensors[STATE_GROUP] = self.source.state_tensors()
        return tensors

    def __call__(self, x: torch.Tensor, ctx: SharingContext) -> torch.Tensor:
        if self.source is not None:
            self.source(x, ctx)
        qr = self.q_norm(self.q_a(x))
        if self.indexer is not None:
            self.indexer(qr, x, ctx)
        angles = ctx.angles(compressed=self.cache is not None)
        q_THD = self.q_b(qr).view(-1, self.heads, self.config.head_dim)
        o_THD = sparse_attention(
            rotate_tail_pairs(q_THD, angles.cos_TF, angles.sin_TF),
            self._write_window(x, ctx),
            ctx.first_T,
            ctx.last_T,
            ctx.sequence_T,
            self.sinks_H,
            scale=self.config.head_dim**-0.5,
            entries=self._entries(ctx),
        )
        o_THD = rotate_tail_pairs(o_THD, angles.cos_TF, angles.sin_TF, inverse=True)
        return self.out(o_THD.flatten(1))

    def _write_window(self, x: torch.Tensor, ctx: SharingContext) -> Rows:
        angles, form = ctx.angles(compressed=self.cache is not None), self.config.forms.window
        kv_T1D = self.kv_norm(self.kv(x))[:, None]
        kv_TD = rotate_tail_pairs(kv_T1D, angles.cos_TF, angles.sin_TF).squeeze(1)
        rows = Rows(ctx.pools[WINDOW_GROUP][self._window], ctx.pages(WINDOW_GROUP), form)
        write_pages(stored(kv_TD, form), rows.pool, rows.pages, ctx.sequence_T, ctx.positions_T)
        return rows

    def _entries(self, ctx: SharingContext) -> Entries | None:
        if self.cache is None:
            return None
        assert ctx.carry.selected_TS is not None
        visible_T = ctx.visible(self.cache.ratio)
        return Entries(self.cache.entries(ctx), visible_T, ctx.carry.selected_TS)

    @property
    def _window(self) -> str:
        return f"{self.name}.kv"
