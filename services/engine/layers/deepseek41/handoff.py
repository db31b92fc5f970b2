"""What one pipeline stage hands to the next, so that a cut may lie between any two layers.

The hidden state between stages is fp32 [T, n * D + columns]: the streams, then

==========  ======  ==========================================================================
columns     width   present
==========  ======  ==========================================================================
collapse    n       always: the weights of the next sublayer's collapse
selected    S       where the next layer reads the choice of an index source before the cut
candidates  C       where an index source after the cut is limited by blocks chosen before it
entries     D       where layers after the cut read the cache of a source before it
keys        K       where index sources among those layers score its keys
==========  ======  ==========================================================================

Entries and keys are those that the step has added. The later stage keeps its own copy of the
source's cache and adds them, so that every layer finds the whole cache on its own stage. Ids are
exact: fp32 holds integers up to 2^24, above any number of entries that is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.lightning_index import Candidates
from services.engine.cache.spec import CacheTensor
from services.engine.layers.deepseek41.context import Published, SharingContext
from services.engine.layers.deepseek41.source import SharedCache

# Legend: T tokens, n streams, X = n * D, Z columns of a hand-off.


@dataclass(frozen=True, slots=True)
class Cut:
    """Widths of the columns at one place between layers; 0 where they are absent."""

    streams: int
    selected: int = 0
    candidates: int = 0
    block: int = 1  # entries of a candidate block
    cache: SharedCache | None = None  # whose new entries cross
    with_keys: bool = False

    @property
    def widths(self) -> tuple[int, int, int, int, int]:
        """In the order of the columns."""
        entries = self.cache.width if self.cache else 0
        keys = self.cache.key_width if self.cache and self.with_keys else 0
        return (self.streams, self.selected, self.candidates, entries, keys)


@dataclass(frozen=True, slots=True)
class Receive:
    """First of a stage's layers: takes the columns off and keeps the copied cache up to date."""

    cut: Cut
    dtype: torch.dtype

    def __call__(self, hidden_TZ: torch.Tensor, ctx: SharingContext) -> torch.Tensor:
        """fp32 [T, X + columns] to [T, X] of the compute type."""
        widths, cut = self.cut.widths, self.cut
        sizes = [hidden_TZ.shape[1] - sum(widths), *widths]
        x_TX, pre_Tn, selected, candidates, entries, keys = torch.split(hidden_TZ, sizes, dim=1)
        carry = ctx.carry
        carry.pre_Tn = pre_Tn
        if cut.selected:
            carry.selected_TS = selected.long()
        if cut.candidates:
            carry.candidates = Candidates(candidates.long(), cut.block)
        if cut.cache is not None:
            keys_TD = keys.to(self.dtype) if cut.with_keys else None
            carry.published = Published(entries.to(self.dtype), keys_TD)
            cut.cache.write(carry.published, ctx)
        return x_TX.to(self.dtype)

    def cache_tensors(self) -> Mapping[str, tuple[CacheTensor, ...]]:
        """The copy of the source's cache."""
        cache = self.cut.cache
        return {} if cache is None else {cache.group: cache.tensors(self.dtype)}


@dataclass(frozen=True, slots=True)
class Send:
    """Last of a stage's layers: puts the columns behind the streams."""

    cut: Cut

    def __call__(self, hidden_TX: torch.Tensor, ctx: SharingContext) -> torch.Tensor:
        """[T, X] to fp32 [T, X + columns]."""
        carry, cut = ctx.carry, self.cut
        assert carry.pre_Tn is not None
        parts = [hidden_TX.float(), carry.pre_Tn]
        if cut.selected:
            assert carry.selected_TS is not None
            parts.append(carry.selected_TS.float())
        if cut.candidates:
            assert carry.candidates is not None
            parts.append(carry.candidates.blocks_TC.float())
        if cut.cache is not None:
            parts += _published(carry.published, with_keys=cut.with_keys)
        return torch.cat(parts, dim=1)

    def cache_tensors(self) -> Mapping[str, tuple[CacheTensor, ...]]:
        """None."""
        return {}


def _published(new: Published | None, *, with_keys: bool) -> list[torch.Tensor]:
    assert new is not None
    if not with_keys:
        return [new.entries_TD.float()]
    assert new.keys_TD is not None
    return [new.entries_TD.float(), new.keys_TD.float()]
