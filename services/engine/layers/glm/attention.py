"""Latent attention without positions over the tokens that an indexer selects."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.mla import absorb_queries, expand_values, mla_attention
from kernels.paged_attention import write_pages
from kernels.quant_linear import Matrix
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader, even_part, even_share
from services.engine.layers.context import KV_GROUP, PassContext
from services.engine.layers.glm.indexer import PoolIndexer, PoolIndexerConfig
from services.engine.layers.linear import Linear, RowLinear
from services.engine.layers.norm import RmsNorm
from services.engine.models.base import Collectives

# Legend: T tokens, H heads, K query/key dim, V value dim, C latent dim.


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Head count and widths, all ranks together."""

    hidden: int
    heads: int
    query_rank: int
    latent: int
    key_dim: int
    value_dim: int
    eps: float
    indexer: PoolIndexerConfig

    def page_tensors(self, name: str, dtype: torch.dtype) -> tuple[CacheTensor, ...]:
        """What one token's entry of the kv group holds for the layer `name`, on every rank."""
        return (CacheTensor(f"{name}.latent", (self.latent,), dtype),)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """x [T, hidden] to fp32 [T, hidden]; heads are split over ranks, latents are on every rank."""

    name: str  # of its cache tensors
    config: MlaConfig
    heads: int  # of this rank
    q_a: Linear
    q_norm: RmsNorm
    q_b: Linear
    kv_a: Linear
    kv_norm: RmsNorm
    kv_b: Matrix  # K key rows, then V value rows, of each head of this rank
    out: RowLinear
    indexer: PoolIndexer

    @classmethod
    def load(
        cls, reader: WeightReader, name: str, config: MlaConfig, collectives: Collectives
    ) -> LatentAttention:
        c = config
        rows, values = c.heads * (c.key_dim + c.value_dim), c.heads * c.value_dim
        part = even_part(reader.shard, 0, rows, what="kv_b_proj")
        return cls(
            name=name,
            config=config,
            heads=even_share(c.heads, reader.shard.world, "num_attention_heads"),
            q_a=Linear.replicated(reader, "q_a_proj", (c.query_rank, c.hidden)),
            q_norm=_norm(reader, "q_a_layernorm", c.query_rank, c.eps),
            q_b=Linear.by_outputs(reader, "q_b_proj", (c.heads * c.key_dim, c.query_rank)),
            kv_a=Linear.replicated(reader, "kv_a_proj_with_mqa", (c.latent, c.hidden)),
            kv_norm=_norm(reader, "kv_a_layernorm", c.latent, c.eps),
            kv_b=reader.matrix("kv_b_proj", (rows, c.latent), part),
            out=RowLinear.by_inputs(reader, "o_proj", (c.hidden, values), collectives),
            indexer=PoolIndexer.load(reader.at("indexer"), name, c.indexer),
        )

    def __call__(self, x: torch.Tensor, ctx: PassContext) -> torch.Tensor:
        c = self.config
        query_latent = self.q_norm(self.q_a(x))
        q_THK = self.q_b(query_latent).view(-1, self.heads, c.key_dim)
        pool, pages = ctx.pools[KV_GROUP][f"{self.name}.latent"], ctx.pages(KV_GROUP)
        write_pages(self.kv_norm(self.kv_a(x)), pool, pages, ctx.sequence_T, ctx.positions_T)
        selected_TS = self.indexer(x, query_latent, ctx)
        mixed_THC = mla_attention(
            absorb_queries(q_THK, self.kv_b),
            pool,
            pages,
            ctx.sequence_T,
            scale=c.key_dim**-0.5,
            selected_TS=selected_TS,
        )
        return self.out(expand_values(mixed_THC, self.kv_b, c.value_dim).flatten(1))


def _norm(reader: WeightReader, name: str, size: int, eps: float) -> RmsNorm:
    return RmsNorm.load(reader, name, size, eps, zero_centred=False)
