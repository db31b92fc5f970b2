"""Grouped-query attention with an output gate, dense or over the tokens that an indexer selects."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.paged_attention import paged_attention, write_pages
from kernels.rotary import apply_rotary
from services.common.checkpoint import CheckpointError
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader, even_part, even_share
from services.engine.checkpoints.tensors import Slice
from services.engine.layers.context import KV_GROUP, StepContext
from services.engine.layers.indexer import IndexerConfig, QsaIndexer
from services.engine.layers.linear import Linear, RowLinear
from services.engine.layers.norm import RmsNorm
from services.engine.models.base import Collectives, Shard

# Legend: T tokens, H query heads, G key heads, D head dim.


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Head counts and widths, all ranks together. `indexer` None attends densely."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    indexer: IndexerConfig | None = None


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """x [T, hidden] to fp32 [T, hidden]; query heads are split over ranks.

    Key heads are split as well, and shared by neighbouring ranks where there are fewer of them
    than ranks. `q_proj` holds D query rows, then D gate rows, for each head.
    """

    name: str  # of its cache tensors
    config: AttentionConfig
    heads: int  # of this rank
    kv_heads: int
    q: Linear
    k: Linear
    v: Linear
    q_norm: RmsNorm
    k_norm: RmsNorm
    out: RowLinear
    indexer: QsaIndexer | None

    @classmethod
    def load(
        cls, reader: WeightReader, name: str, config: AttentionConfig, collectives: Collectives
    ) -> GatedAttention:
        hidden, width, eps = config.hidden, config.head_dim, config.eps
        kv_heads, kv_part = _key_heads(config, reader.shard)
        kv_shape = (config.kv_heads * width, hidden)
        return cls(
            name=name,
            config=config,
            heads=even_share(config.heads, reader.shard.world, "num_attention_heads"),
            kv_heads=kv_heads,
            q=Linear.by_outputs(reader, "q_proj", (2 * config.heads * width, hidden)),
            k=Linear.of_part(reader, "k_proj", kv_shape, kv_part),
            v=Linear.of_part(reader, "v_proj", kv_shape, kv_part),
            q_norm=RmsNorm.load(reader, "q_norm", width, eps),
            k_norm=RmsNorm.load(reader, "k_norm", width, eps),
            out=RowLinear.by_inputs(reader, "o_proj", (hidden, config.heads * width), collectives),
            indexer=QsaIndexer.load(reader.at("indexer"), name, config.indexer)
            if config.indexer
            else None,
        )

    def page_tensors(self, dtype: torch.dtype) -> tuple[CacheTensor, ...]:
        """What one token's entry of the kv group holds for this layer."""
        shape = (self.kv_heads, self.config.head_dim)
        return tuple(CacheTensor(f"{self.name}.{kind}", shape, dtype) for kind in ("k", "v"))

    def __call__(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        width = self.config.head_dim
        q_and_gate = self.q(x).view(-1, self.heads, 2 * width)
        cos, sin = ctx.angles.cos_TF, ctx.angles.sin_TF
        q_THD = apply_rotary(self.q_norm(q_and_gate[..., :width]), cos, sin)
        k_TGD = self.k_norm(self.k(x).view(-1, self.kv_heads, width))
        v_TGD = self.v(x).view(-1, self.kv_heads, width)
        pools, pages = ctx.pools[KV_GROUP], ctx.pages(KV_GROUP)
        k_pool, v_pool = pools[f"{self.name}.k"], pools[f"{self.name}.v"]
        at = (pages, ctx.sequence_T, ctx.positions_T)
        write_pages(apply_rotary(k_TGD, cos, sin), k_pool, *at)
        write_pages(v_TGD, v_pool, *at)
        selected = None if self.indexer is None else self.indexer(x, ctx)
        gate_THD = q_and_gate[..., width:]
        o = paged_attention(q_THD, k_pool, v_pool, *at, gate_THD=gate_THD, selected_TS=selected)
        return self.out(o.flatten(1))


def _key_heads(config: AttentionConfig, shard: Shard) -> tuple[int, Slice | None]:
    """Number of key heads of this rank, and their rows of k_proj and v_proj."""
    total, world, width = config.kv_heads, shard.world, config.head_dim
    if world <= total:
        part = even_part(shard, 0, total * width, what="num_key_value_heads")
        return even_share(total, world, "num_key_value_heads"), part
    if world % total:
        raise CheckpointError(
            f"num_key_value_heads: {total} cannot be shared evenly by {world} tensor-parallel ranks"
        )
    head = shard.rank * total // world
    return 1, Slice(0, ((head * width, (head + 1) * width),))
