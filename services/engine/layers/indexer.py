"""Token selection of query-sparse attention; every rank holds and computes the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.causal_conv import history
from kernels.qsa_index import mean_of_blocks, select_tokens, write_closed_blocks
from kernels.rotary import apply_rotary
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.context import INDEX_GROUP, StepContext, rows_of
from services.engine.layers.linear import Linear
from services.engine.layers.norm import RmsNorm

# Legend: T tokens, H index heads, D index head dim, S selected tokens.


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """`budget` tokens are selected in blocks of `ratio`."""

    hidden: int
    heads: int
    head_dim: int
    budget: int
    ratio: int
    eps: float


@dataclass(frozen=True, slots=True)
class QsaIndexer:
    """x [T, hidden] to the positions that each token attends to.

    Keeps one compressed key per block of `ratio` tokens (index group) and the raw keys of the
    last ratio - 1 tokens (state group), from which the next block is closed.
    """

    name: str  # of its cache tensors
    config: IndexerConfig
    qk: Linear
    q_norm: RmsNorm
    k_norm: RmsNorm

    @classmethod
    def load(cls, reader: WeightReader, name: str, config: IndexerConfig) -> QsaIndexer:
        rows = (config.heads + 1) * config.head_dim
        return cls(
            name=name,
            config=config,
            qk=Linear.replicated(reader, "index_qk_proj", (rows, config.hidden)),
            q_norm=RmsNorm.load(reader, "q_layernorm", config.head_dim, config.eps),
            k_norm=RmsNorm.load(reader, "k_layernorm", config.head_dim, config.eps),
        )

    def page_tensors(self, dtype: torch.dtype) -> tuple[CacheTensor, ...]:
        """What one block's entry of the index group holds for this layer."""
        return (CacheTensor(f"{self.name}.index", (self.config.head_dim,), dtype),)

    def state_tensors(self, dtype: torch.dtype) -> tuple[CacheTensor, ...]:
        """What one slot of the state group holds for this layer."""
        shape = (self.config.ratio - 1, self.config.head_dim)
        return (CacheTensor(f"{self.name}.raw_keys", shape, dtype),)

    def __call__(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """int64 [T, budget + ratio - 1], ascending, -1 behind the last."""
        c = self.config
        qk = self.qk(x)
        q, raw_TD = qk[:, : c.heads * c.head_dim], qk[:, c.heads * c.head_dim :]
        pool, pages = ctx.pools[INDEX_GROUP][f"{self.name}.index"], ctx.pages(INDEX_GROUP)
        at = (pages, ctx.sequence_T, ctx.positions_T)
        write_closed_blocks(self._block_keys(raw_TD, ctx), pool, *at, c.ratio)
        q_THD = self.q_norm(q.view(-1, c.heads, c.head_dim))
        q_THD = apply_rotary(q_THD, ctx.angles.cos_TF, ctx.angles.sin_TF)
        return select_tokens(q_THD, pool, *at, ratio=c.ratio, budget=c.budget)

    def _block_keys(self, raw_TD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Key [T, D] of the block that each token would close; writes the raw-key window."""
        assert ctx.block_angles is not None
        size = self.config.ratio - 1
        past = history(raw_TD, ctx.read_state(f"{self.name}.raw_keys"))
        ctx.write_window(f"{self.name}.raw_keys", past, size)
        key_T1D = self.k_norm(mean_of_blocks(rows_of(past, ctx.history_rows(size))))[:, None]
        angles = ctx.block_angles
        return apply_rotary(key_T1D, angles.cos_TF, angles.sin_TF).squeeze(1)
