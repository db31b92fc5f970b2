"""Caches of compressed entries that several layers read, and the layers that fill them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cache_rows import COMPRESSED_ROWS, INDEX_ROWS, WINDOW_ROWS, RowFormat
from kernels.compressor import STATE_ROWS, pool_rows, write_entries
from kernels.rotary import rotate_tail_pairs
from kernels.sparse_attention import Rows
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.deepseek.rows import row_tensor, stored
from services.engine.layers.deepseek41.context import Published, SharingContext
from services.engine.layers.linear import Linear
from services.engine.layers.norm import RmsNorm

# Legend: T tokens, D width of an entry or key.

ENTRY_GROUPS = {1: "entries", 2: "entries_2"}  # by ratio


@dataclass(frozen=True, slots=True)
class CacheForms:
    """How cache rows are stored: as values of the compute type, or quantised as in training."""

    window: RowFormat | None = None
    entries: RowFormat | None = None
    keys: RowFormat | None = None


QUANTISED = CacheForms(WINDOW_ROWS, COMPRESSED_ROWS, INDEX_ROWS)


@dataclass(frozen=True, slots=True)
class SharedCache:
    """The entries and index keys of one source layer, one of each for `ratio` tokens."""

    layer: int
    ratio: int
    width: int
    key_width: int
    forms: CacheForms

    @property
    def group(self) -> str:
        """The paged group that it lies in."""
        return ENTRY_GROUPS[self.ratio]

    def tensors(self, dtype: torch.dtype) -> tuple[CacheTensor, ...]:
        """What one entry of the group holds."""
        return (
            row_tensor(self._entries, self.width, dtype, self.forms.entries),
            row_tensor(self._keys, self.key_width, dtype, self.forms.keys),
        )

    def entries(self, ctx: SharingContext) -> Rows:
        """The entries, latents that are key and value."""
        pool = ctx.pools[self.group][self._entries]
        return Rows(pool, ctx.pages(self.group), self.forms.entries)

    def keys(self, ctx: SharingContext) -> Rows:
        """The keys that an indexer scores."""
        pool = ctx.pools[self.group][self._keys]
        return Rows(pool, ctx.pages(self.group), self.forms.keys)

    def write(self, new: Published, ctx: SharingContext) -> None:
        """Store the entries, and the keys where there are any, of the windows that close."""
        at = (ctx.pages(self.group), ctx.sequence_T, ctx.positions_T, self.ratio)
        entries = self.entries(ctx)
        write_entries(stored(new.entries_TD, entries.form), entries.pool, *at)
        if new.keys_TD is not None:
            keys = self.keys(ctx)
            write_entries(stored(new.keys_TD, keys.form), keys.pool, *at)

    @property
    def _entries(self) -> str:
        return f"layers.{self.layer}.entries"

    @property
    def _keys(self) -> str:
        return f"layers.{self.layer}.keys"


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """x [T, hidden] to the entries and keys of the windows that its tokens close.

    On every rank whole. With ratio 2 the open window is kept in the state group, in fp32.
    """

    cache: SharedCache
    wkv: Linear
    wgate: Linear | None  # None where every token is a window of its own
    norm: RmsNorm
    key: Linear
    key_norm: RmsNorm

    @classmethod
    def load(cls, reader: WeightReader, cache: SharedCache, hidden: int, eps: float) -> SourceLayer:
        """Read `compressor` and the key part of `indexer`."""
        compressor, indexer = reader.at("compressor"), reader.at("indexer")
        shape = (cache.width, hidden)
        gated = cache.ratio > 1
        return cls(
            cache=cache,
            wkv=Linear.replicated(compressor, "wkv", shape),
            wgate=Linear.replicated(compressor, "wgate", shape) if gated else None,
            norm=RmsNorm.load(compressor, "norm", cache.width, eps, zero_centred=False),
            key=Linear.replicated(indexer, "wk", (cache.key_width, cache.width)),
            key_norm=RmsNorm.load(indexer, "k_norm", cache.key_width, eps, zero_centred=False),
        )

    def state_tensors(self) -> tuple[CacheTensor, ...]:
        """What one slot of the state group holds."""
        if self.wgate is None:
            return ()
        return (CacheTensor(self._state, (STATE_ROWS, self.cache.width), torch.float32),)

    def __call__(self, x: torch.Tensor, ctx: SharingContext) -> None:
        """Write the cache and publish what was written."""
        latent_TD = self.norm(self._pooled(x, ctx), x.dtype)
        keys_TD = self.key_norm(self.key(latent_TD))
        new = Published(self._turned(latent_TD, ctx), self._turned(keys_TD, ctx))
        self.cache.write(new, ctx)
        ctx.carry.published = new

    def _pooled(self, x: torch.Tensor, ctx: SharingContext) -> torch.Tensor:
        if self.wgate is None:
            return self.wkv(x)
        pooled_TD, states = pool_rows(
            self.wkv(x, torch.float32),
            self.wgate(x, torch.float32),
            ctx.read_state(self._state),
            ctx.batch.starts_B1,
            ctx.positions_T,
            ctx.state_writes.token_W,
            ratio=self.cache.ratio,
        )
        ctx.write_state(self._state, states)
        return pooled_TD

    def _turned(self, x_TD: torch.Tensor, ctx: SharingContext) -> torch.Tensor:
        """Rotated to the first position of the window that each token belongs to."""
        angles = ctx.entry_angles[self.cache.ratio]
        return rotate_tail_pairs(x_TD[:, None], angles.cos_TF, angles.sin_TF).squeeze(1)

    @property
    def _state(self) -> str:
        return f"layers.{self.cache.layer}.pooled"
