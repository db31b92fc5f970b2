"""Latent attention of DeepSeek-V4: a window, and compressed entries where the layer has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.cache_rows import RowFormat
from kernels.sparse_attention import Entries
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.context import STATE_GROUP
from services.engine.layers.deepseek.compressor import Compressor, CompressorConfig
from services.engine.layers.deepseek.context import WINDOW_GROUP, DeepseekContext
from services.engine.layers.deepseek.indexer import (
    INDEX_GROUP,
    IndexerConfig,
    LightningIndexer,
    index_name,
)
from services.engine.layers.deepseek.latent import LatentHeads, LatentSizes, window_rows
from services.engine.layers.deepseek.rows import row_tensor
from services.engine.models.base import Collectives

# Legend: T tokens.

CSA_RATIO = 4  # overlapping windows, chosen by an indexer
HCA_RATIO = 128  # every entry attended to
CSA_GROUP = "csa"
HCA_GROUP = "hca"
ENTRY_GROUPS = {CSA_RATIO: CSA_GROUP, HCA_RATIO: HCA_GROUP}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(LatentSizes):
    """Sizes of the layers; `form` is that of window rows and entries."""

    indexer: IndexerConfig
    form: RowFormat | None = None

    def compressor(self, ratio: int) -> CompressorConfig | None:
        """Of a layer with entries of `ratio` tokens; None for ratio 0, a window alone."""
        if not ratio:
            return None
        overlap = ratio == CSA_RATIO
        return CompressorConfig(self.hidden, self.head_dim, ratio, overlap, self.eps, self.form)

    def cache_tensors(
        self, name: str, ratio: int, dtype: torch.dtype
    ) -> Mapping[str, tuple[CacheTensor, ...]]:
        """Cache tensors of the layer `name` by group; `dtype` is that of rows without a form."""
        row = row_tensor(window_rows(name), self.head_dim, dtype, self.form)
        tensors: dict[str, tuple[CacheTensor, ...]] = {WINDOW_GROUP: (row,)}
        compressor = self.compressor(ratio)
        if compressor is not None:
            tensors[ENTRY_GROUPS[ratio]] = compressor.page_tensors(name, dtype)
            tensors[STATE_GROUP] = compressor.state_tensors(name)
        if ratio == CSA_RATIO:
            keys, index = self.indexer.keys, index_name(name)
            tensors[INDEX_GROUP] = keys.page_tensors(index, dtype)
            tensors[STATE_GROUP] += keys.state_tensors(index)
        return tensors


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """x [T, hidden] to fp32 [T, hidden]."""

    name: str  # of its cache tensors
    config: LatentConfig
    heads: LatentHeads
    compressor: Compressor | None
    indexer: LightningIndexer | None

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        name: str,
        config: LatentConfig,
        ratio: int,
        collectives: Collectives,
    ) -> LatentAttention:
        """`ratio` 0 attends to the window alone."""
        compressor = config.compressor(ratio)
        return cls(
            name=name,
            config=config,
            heads=LatentHeads.load(
                reader, name, config, config.form, collectives, compressed=compressor is not None
            ),
            compressor=Compressor.load(reader.at("compressor"), name, compressor)
            if compressor is not None
            else None,
            indexer=LightningIndexer.load(reader.at("indexer"), name, config.indexer)
            if ratio == CSA_RATIO
            else None,
        )

    def __call__(self, x: torch.Tensor, ctx: DeepseekContext) -> torch.Tensor:
        qr = self.heads.latent(x)
        entries = self._entries(qr, x, ctx)
        return self.heads.attend(qr, x, ctx, entries, unit_queries=True)

    def _entries(self, qr: torch.Tensor, x: torch.Tensor, ctx: DeepseekContext) -> Entries | None:
        if self.compressor is None:
            return None
        ratio = self.compressor.config.ratio
        rows = self.compressor(x, ctx, ENTRY_GROUPS[ratio])
        selected_TS = None if self.indexer is None else self.indexer(qr, x, ctx)
        return Entries(rows, ctx.visible(ratio), selected_TS)
