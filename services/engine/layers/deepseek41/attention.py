"""Latent attention of DeepSeek-V4.1: a window of its own and entries of a source layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.sparse_attention import Entries
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.context import STATE_GROUP
from services.engine.layers.deepseek.context import WINDOW_GROUP
from services.engine.layers.deepseek.latent import LatentHeads, LatentSizes
from services.engine.layers.deepseek.rows import row_tensor
from services.engine.layers.deepseek41.context import SharingContext
from services.engine.layers.deepseek41.indexer import CandidateRole, IndexConfig, IndexSource
from services.engine.layers.deepseek41.source import CacheForms, SharedCache, SourceLayer
from services.engine.models.base import Collectives

# Legend: T tokens.


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(LatentSizes):
    """Sizes of the layers and forms of their cache rows."""

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
    """x [T, hidden] to fp32 [T, hidden]."""

    heads: LatentHeads
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
        """`name` is that of its cache tensors."""
        c, cache = config, role.cache
        source = indexer = None
        if cache is not None and role.is_source:
            source = SourceLayer.load(reader, cache, c.hidden, c.eps)
        if cache is not None and role.is_index_source:
            indexer = IndexSource.load(reader, c.index, cache, role.candidates)
        return cls(
            heads=LatentHeads.load(
                reader, name, c, c.forms.window, collectives, compressed=cache is not None
            ),
            cache=cache,
            source=source,
            indexer=indexer,
        )

    def cache_tensors(self, dtype: torch.dtype) -> Mapping[str, tuple[CacheTensor, ...]]:
        """Cache tensors by group; plain rows are of type `dtype`."""
        heads = self.heads
        row = row_tensor(heads.rows_name, heads.sizes.head_dim, dtype, heads.form)
        tensors: dict[str, tuple[CacheTensor, ...]] = {WINDOW_GROUP: (row,)}
        if self.source is not None:
            tensors[self.source.cache.group] = self.source.cache.tensors(dtype)
            tensors[STATE_GROUP] = self.source.state_tensors()
        return tensors

    def __call__(self, x: torch.Tensor, ctx: SharingContext) -> torch.Tensor:
        if self.source is not None:
            self.source(x, ctx)
        qr = self.heads.latent(x)
        if self.indexer is not None:
            self.indexer(qr, x, ctx)
        return self.heads.attend(qr, x, ctx, self._entries(ctx), unit_queries=False)

    def _entries(self, ctx: SharingContext) -> Entries | None:
        if self.cache is None:
            return None
        assert ctx.carry.selected_TS is not None
        visible_T = ctx.visible(self.cache.ratio)
        return Entries(self.cache.entries(ctx), visible_T, ctx.carry.selected_TS)
