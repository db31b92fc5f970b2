"""What the attention of V4 and of V4.1 share: queries, a window of its own, sinks, output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cache_rows import RowFormat
from kernels.paged_attention import write_pages
from kernels.rms_norm import rms_norm
from kernels.rotary import rotate_tail_pairs
from kernels.sparse_attention import Entries, Rows, sparse_attention
from services.engine.checkpoints.loader import WeightReader, even_part, even_share
from services.engine.layers.deepseek.context import WINDOW_GROUP, DeepseekContext
from services.engine.layers.deepseek.grouped import GroupedOutput
from services.engine.layers.deepseek.rows import stored
from services.engine.layers.linear import Linear
from services.engine.layers.norm import RmsNorm
from services.engine.models.base import Collectives

# Legend: T tokens, H query heads of this rank, D head dim, R rank of the queries.


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Head counts and widths, all ranks together."""

    hidden: int
    heads: int
    head_dim: int
    query_rank: int
    output_groups: int
    output_rank: int
    eps: float


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Attention to a window and to given entries; query heads are split over ranks, keys are not.

    `form` is that of window rows; `compressed` tells whose rotary angles apply.
    """

    rows_name: str  # of its window's cache tensor
    sizes: LatentSizes
    form: RowFormat | None
    compressed: bool
    heads: int  # of this rank
    q_a: Linear
    q_norm: RmsNorm
    q_b: Linear
    kv: Linear
    kv_norm: RmsNorm
    sinks_H: torch.Tensor
    out: GroupedOutput

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        name: str,
        sizes: LatentSizes,
        form: RowFormat | None,
        collectives: Collectives,
        *,
        compressed: bool,
    ) -> LatentHeads:
        c = sizes
        sinks = even_part(reader.shard, 0, c.heads, what="num_attention_heads")
        return cls(
            rows_name=window_rows(name),
            sizes=c,
            form=form,
            compressed=compressed,
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
        )

    def latent(self, x: torch.Tensor) -> torch.Tensor:
        """The queries before their heads, [T, R]."""
        return self.q_norm(self.q_a(x))

    def attend(
        self,
        latent_TR: torch.Tensor,
        x: torch.Tensor,
        ctx: DeepseekContext,
        entries: Entries | None,
        *,
        unit_queries: bool,
    ) -> torch.Tensor:
        """fp32 [T, hidden]. `unit_queries` divides the query of every head by its size."""
        angles = ctx.angles(compressed=self.compressed)
        q_THD = self.q_b(latent_TR).view(-1, self.heads, self.sizes.head_dim)
        if unit_queries:
            q_THD = rms_norm(q_THD, None, eps=self.sizes.eps)
        o_THD = sparse_attention(
            rotate_tail_pairs(q_THD, angles.cos_TF, angles.sin_TF),
            self._write_window(x, ctx),
            ctx.first_T,
            ctx.last_T,
            ctx.sequence_T,
            self.sinks_H,
            scale=self.sizes.head_dim**-0.5,
            entries=entries,
        )
        o_THD = rotate_tail_pairs(o_THD, angles.cos_TF, angles.sin_TF, inverse=True)
        return self.out(o_THD.flatten(1))

    def _write_window(self, x: torch.Tensor, ctx: DeepseekContext) -> Rows:
        angles = ctx.angles(compressed=self.compressed)
        kv_T1D = self.kv_norm(self.kv(x))[:, None]
        kv_TD = rotate_tail_pairs(kv_T1D, angles.cos_TF, angles.sin_TF).squeeze(1)
        pool = ctx.pools[WINDOW_GROUP][self.rows_name]
        rows = Rows(pool, ctx.pages(WINDOW_GROUP), self.form)
        write_pages(stored(kv_TD, self.form), pool, rows.pages, ctx.sequence_T, ctx.positions_T)
        return rows


def window_rows(name: str) -> str:
    """Name of the window's cache tensor of the layer `name`."""
    return f"{name}.kv"
