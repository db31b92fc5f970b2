"""Latent attention of DeepSeek-V4: a window, and compressed entries where the layer has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.cache_rows import RowFormat
from kernels.paged_attention import write_pages
from kernels.rms_norm import rms_norm
from kernels.rotary import rotate_tail_pairs
from kernels.sparse_attention import Entries, Rows, sparse_attention
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader, even_part, even_share
from services.engine.layers.context import STATE_GROUP
from services.engine.layers.deepseek.compressor import Compressor, CompressorConfig
from services.engine.layers.deepseek.context import WINDOW_GROUP, DeepseekContext
from services.engine.layers.deepseek.grouped import GroupedOutput
from services.engine.layers.deepseek.indexer import (
    INDEX_GROUP,
    IndexerConfig,
    LightningIndexer,
    index_name,
)
from services.engine.layers.deepseek.rows import row_tensor, stored
from services.engine.layers.linear import Linear
from services.engine.layers.norm import RmsNorm
from services.engine.models.base import Collectives

# Legend: T tokens, H query heads, D head dim.

CSA_RATIO = 4  # overlapping windows, chosen by an indexer
HCA_RATIO = 128  # every entry attended to
CSA_GROUP = "csa"
HCA_GROUP = "hca"
ENTRY_GROUPS = {CSA_RATIO: CSA_GROUP, HCA_RATIO: HCA_GROUP}


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Head counts and widths, all ranks together; `form` of window rows and entries."""

    hidden: int
    heads: int
    head_dim: int
    query_rank: int
    output_groups: int
    output_rank: int
    eps: float
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
        row = row_tensor(f"{name}.kv", self.head_dim, dtype, self.form)
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
    """x [T, hidden] to fp32 [T, hidden]; query heads are split over ranks, keys are not."""

    name: str  # of its cache tensors
    config: LatentConfig
    heads: int  # of this rank
    q_a: Linear
    q_norm: RmsNorm
    q_b: Linear
    kv: Linear
    kv_norm: RmsNorm
    sinks_H: torch.Tensor
    out: GroupedOutput
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
        c, world, compressor = config, reader.shard.world, config.compressor(ratio)
        sinks = even_part(reader.shard, 0, c.heads, what="num_attention_heads")
        return cls(
            name=name,
            config=config,
            heads=even_share(c.heads, world, "num_attention_heads"),
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
            compressor=Compressor.load(reader.at("compressor"), name, compressor)
            if compressor is not None
            else None,
            indexer=LightningIndexer.load(reader.at("indexer"), name, c.indexer)
            if ratio == CSA_RATIO
            else None,
        )

    def __call__(self, x: torch.Tensor, ctx: DeepseekContext) -> torch.Tensor:
        angles = ctx.angles(compressed=self.compressor is not None)
        qr = self.q_norm(self.q_a(x))
        q_THD = self.q_b(qr).view(-1, self.heads, self.config.head_dim)
        q_THD = rms_norm(q_THD, None, eps=self.config.eps)
        q_THD = rotate_tail_pairs(q_THD, angles.cos_TF, angles.sin_TF)
        window = self._write_window(x, ctx)
        o_THD = sparse_attention(
            q_THD,
            window,
            ctx.first_T,
            ctx.last_T,
            ctx.sequence_T,
            self.sinks_H,
            scale=self.config.head_dim**-0.5,
            entries=self._entries(qr, x, ctx),
        )
        o_THD = rotate_tail_pairs(o_THD, angles.cos_TF, angles.sin_TF, inverse=True)
        return self.out(o_THD.flatten(1))

    def _write_window(self, x: torch.Tensor, ctx: DeepseekContext) -> Rows:
        angles = ctx.angles(compressed=self.compressor is not None)
        kv_T1D = self.kv_norm(self.kv(x))[:, None]
        kv_TD = rotate_tail_pairs(kv_T1D, angles.cos_TF, angles.sin_TF).squeeze(1)
        form, pool = self.config.form, ctx.pools[WINDOW_GROUP][f"{self.name}.kv"]
        rows = Rows(pool, ctx.pages(WINDOW_GROUP), form)
        write_pages(stored(kv_TD, form), pool, rows.pages, ctx.sequence_T, ctx.positions_T)
        return rows

    def _entries(self, qr: torch.Tensor, x: torch.Tensor, ctx: DeepseekContext) -> Entries | None:
        if self.compressor is None:
            return None
        ratio = self.compressor.config.ratio
        rows = self.compressor(x, ctx, ENTRY_GROUPS[ratio])
        selected_TS = None if self.indexer is None else self.indexer(qr, x, ctx)
        return Entries(rows, ctx.visible(ratio), selected_TS)
