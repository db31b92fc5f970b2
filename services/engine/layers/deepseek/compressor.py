"""Compressed entries of DeepSeek-V4 attention and of its indexer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cache_rows import RowFormat
from kernels.compressor import OVERLAP_STATE_ROWS, STATE_ROWS, pool_rows, write_entries
from kernels.hadamard import hadamard
from kernels.rotary import rotate_tail_pairs
from kernels.sparse_attention import Rows
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.deepseek.context import DeepseekContext
from services.engine.layers.deepseek.rows import row_tensor, stored
from services.engine.layers.linear import Linear
from services.engine.layers.norm import RmsNorm

# Legend: T tokens, D width of an entry, X = D, or 2 D where windows overlap, r ratio.


@dataclass(frozen=True, slots=True)
class CompressorConfig:
    """One entry of width `width` for every `ratio` tokens.

    `form` None stores entries in the compute type; `rotated` stores them Hadamard-rotated.
    """

    hidden: int
    width: int
    ratio: int
    overlap: bool
    eps: float
    form: RowFormat | None = None
    rotated: bool = False

    @property
    def channels(self) -> int:
        """Values that are pooled per token."""
        return (2 if self.overlap else 1) * self.width

    def page_tensors(self, name: str, dtype: torch.dtype) -> tuple[CacheTensor, ...]:
        """One entry of the paged group of the compressor `name`."""
        return (row_tensor(f"{name}.entries", self.width, dtype, self.form),)

    def state_tensors(self, name: str) -> tuple[CacheTensor, ...]:
        """What one slot of the state group holds for the compressor `name`."""
        rows = OVERLAP_STATE_ROWS if self.overlap else STATE_ROWS
        return (CacheTensor(f"{name}.pooled", (rows, self.width), torch.float32),)


@dataclass(frozen=True, slots=True)
class Compressor:
    """x [T, hidden] to the entries of the windows that its tokens close. On every rank whole.

    What a sequence has pooled of its open window is kept in the state group, in fp32.
    """

    name: str  # of its cache tensors
    config: CompressorConfig
    wkv: Linear
    wgate: Linear
    ape_rX: torch.Tensor
    norm: RmsNorm

    @classmethod
    def load(cls, reader: WeightReader, name: str, config: CompressorConfig) -> Compressor:
        shape = (config.channels, config.hidden)
        return cls(
            name=name,
            config=config,
            wkv=Linear.replicated(reader, "wkv", shape),
            wgate=Linear.replicated(reader, "wgate", shape),
            ape_rX=reader.tensor("ape", (config.ratio, config.channels)).float(),
            norm=RmsNorm.load(reader, "norm", config.width, config.eps, zero_centred=False),
        )

    def __call__(self, x: torch.Tensor, ctx: DeepseekContext, group: str) -> Rows:
        """Store the entries of closed windows; where all entries are."""
        c, pool = self.config, ctx.pools[group][f"{self.name}.entries"]
        rows = Rows(pool, ctx.pages(group), c.form)
        entries_TD = self._entries(x, ctx)
        if c.rotated:
            entries_TD = hadamard(entries_TD)
        at = (rows.pages, ctx.sequence_T, ctx.positions_T)
        write_entries(stored(entries_TD, c.form), pool, *at, c.ratio)
        return rows

    def _entries(self, x: torch.Tensor, ctx: DeepseekContext) -> torch.Tensor:
        """[T, D] of the type of x, of meaning for tokens that close a window."""
        c, state = self.config, f"{self.name}.pooled"
        scores_TX = self.wgate(x, torch.float32) + self.ape_rX[ctx.positions_T % c.ratio]
        pooled_TD, states = pool_rows(
            self.wkv(x, torch.float32),
            scores_TX,
            ctx.read_state(state),
            ctx.batch.starts_B1,
            ctx.positions_T,
            ctx.state_writes.token_W,
            ratio=c.ratio,
            overlap=c.overlap,
        )
        ctx.write_state(state, states)
        entries_T1D = self.norm(pooled_TD.to(x.dtype))[:, None]
        angles = ctx.entry_angles[c.ratio]
        return rotate_tail_pairs(entries_T1D, angles.cos_TF, angles.sin_TF).squeeze(1)
