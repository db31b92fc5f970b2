"""Token selection of GLM-5.3: pooled keys, weighted scores; every rank computes the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.causal_conv import history
from kernels.index_pool import KeyPool, pool_keys, select_pools, write_pools
from kernels.quant_linear import PlainMatrix
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.context import INDEX_GROUP, PassContext, rows_of
from services.engine.layers.linear import Linear
from services.engine.layers.vision.parts import LayerNorm

# Legend: T tokens, H index heads, D index head dim, R tokens of a pool, S selected tokens.

_KEY_EPS = 1e-6  # of the keys' layer norm, whatever rms_norm_eps says


@dataclass(frozen=True, slots=True)
class PoolIndexerConfig:
    """`budget` tokens are selected in pools of `ratio`.

    `coded` keeps pooled keys as rotated e4m3 codes with an fp32 scale instead of as computed.
    """

    hidden: int
    query_rank: int
    heads: int
    head_dim: int
    budget: int
    ratio: int
    coded: bool = False

    def page_tensors(self, name: str, dtype: torch.dtype) -> tuple[CacheTensor, ...]:
        """What one pool's entry of the index group holds for the layer `name`."""
        if not self.coded:
            return (CacheTensor(f"{name}.index", (self.head_dim,), dtype),)
        return (
            CacheTensor(f"{name}.index", (self.head_dim,), torch.uint8),
            CacheTensor(f"{name}.index_scale", (1,), torch.float32),
        )

    def state_tensors(self, name: str, dtype: torch.dtype) -> tuple[CacheTensor, ...]:
        """Keys and gates of the last ratio - 1 tokens, from which the next pool is completed."""
        return (CacheTensor(f"{name}.index_tail", (self.ratio - 1, 2 * self.head_dim), dtype),)


@dataclass(frozen=True, slots=True)
class PoolIndexer:
    """x [T, hidden] and the query latent to the positions that each token attends to."""

    name: str  # of its cache tensors
    config: PoolIndexerConfig
    q: Linear
    k: Linear
    k_norm: LayerNorm
    gate: Linear
    pool_bias_RD: torch.Tensor
    weights: Linear

    @classmethod
    def load(cls, reader: WeightReader, name: str, config: PoolIndexerConfig) -> PoolIndexer:
        c = config
        gate = reader.tensor("index_kpool_compress_gate", (c.head_dim, c.hidden))
        return cls(
            name=name,
            config=config,
            q=Linear.replicated(reader, "wq_b", (c.heads * c.head_dim, c.query_rank)),
            k=Linear.replicated(reader, "wk", (c.head_dim, c.hidden)),
            k_norm=LayerNorm.load(reader, "k_norm", c.head_dim, _KEY_EPS),
            gate=Linear(PlainMatrix(gate)),
            pool_bias_RD=reader.tensor("index_kpool_compress_ape", (c.ratio, c.head_dim)),
            weights=Linear.replicated(reader, "weights_proj", (c.heads, c.hidden)),
        )

    def __call__(
        self, x: torch.Tensor, query_latent: torch.Tensor, ctx: PassContext
    ) -> torch.Tensor:
        """int64 [T, budget + ratio - 1], ascending, -1 behind the last."""
        c = self.config
        pool, at = self._pool(ctx), (ctx.pages(INDEX_GROUP), ctx.sequence_T, ctx.positions_T)
        write_pools(self._pooled_keys(x, ctx), pool, *at, c.ratio)
        q_THD = self.q(query_latent).view(-1, c.heads, c.head_dim)
        weights_TH = self.weights(x, torch.float32) * c.heads**-0.5
        return select_pools(q_THD, weights_TH, pool, *at, ratio=c.ratio, budget=c.budget)

    def _pool(self, ctx: PassContext) -> KeyPool:
        pools = ctx.pools[INDEX_GROUP]
        return KeyPool(pools[f"{self.name}.index"], pools.get(f"{self.name}.index_scale"))

    def _pooled_keys(self, x: torch.Tensor, ctx: PassContext) -> torch.Tensor:
        """Key [T, D] of the pool that each token would complete; writes the tail."""
        size, width = self.config.ratio - 1, self.config.head_dim
        key_TD = self.k_norm(self.k(x), x.dtype)
        key_and_gate = torch.cat([key_TD, self.gate(x)], dim=1)
        past = history(key_and_gate, ctx.read_state(f"{self.name}.index_tail"))
        ctx.write_window(f"{self.name}.index_tail", past, size)
        pools_TRX = rows_of(past, ctx.history_rows(size))
        return pool_keys(pools_TRX[..., :width], pools_TRX[..., width:], self.pool_bias_RD)
