"""What a model keeps per sequence: cache groups, their tensors and their bytes.

Three kinds, each with its own pool and its own page size:

===========  =============================================  ==================================
kind         storage                                        a prefix hit needs
===========  =============================================  ==================================
paged        pages of `page_tokens`, one table per sequence every page of the prefix
window       pages; those older than the window are freed   the pages of the last window
state        one slot per sequence, overwritten by a step   the snapshot at the hit's boundary
===========  =============================================  ==================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NewType

import torch

PageId = NewType("PageId", int)
SlotId = NewType("SlotId", int)

GroupKind = Literal["paged", "window", "state"]


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a group. `shape` is that of one entry (paged, window) or one slot (state)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry or slot."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A set of cache tensors that share one table of pages or slots.

    `stride` is the number of tokens that share one entry (4 for keys compressed 4:1). Pool
    tensors are [pages, page_tokens // stride, *shape] for pages and [slots, *shape] for states.
    """

    name: str
    kind: GroupKind
    tensors: tuple[CacheTensor, ...]
    page_tokens: int = 0
    stride: int = 1
    window_tokens: int = 0

    def __post_init__(self) -> None:
        if self.kind == "state":
            if self.page_tokens or self.window_tokens or self.stride != 1:
                raise ValueError(f"cache group {self.name}: a state group has no pages")
            return
        if self.page_tokens <= 0 or self.page_tokens % self.stride:
            raise ValueError(
                f"cache group {self.name}: page_tokens {self.page_tokens} must be a positive "
                f"multiple of stride {self.stride}"
            )
        if (self.kind == "window") != (self.window_tokens > 0):
            raise ValueError(f"cache group {self.name}: window_tokens goes with kind window")

    @property
    def entries_per_page(self) -> int:
        """Entries of one page; 1 for a state group."""
        return 1 if self.kind == "state" else self.page_tokens // self.stride

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, or of one slot for a state group, all tensors together."""
        return self.entries_per_page * sum(t.entry_bytes for t in self.tensors)


# Pool tensors by group name and tensor name.
CachePools = dict[str, dict[str, torch.Tensor]]


def allocate_pools(
    groups: tuple[CacheGroup, ...], sizes: dict[str, int], device: torch.device
) -> CachePools:
    """Zeroed pools of `sizes[group]` pages or slots each."""
    return {
        g.name: {
            t.name: torch.zeros(_pool_shape(g, t, sizes[g.name]), dtype=t.dtype, device=device)
            for t in g.tensors
        }
        for g in groups
    }


def _pool_shape(group: CacheGroup, tensor: CacheTensor, count: int) -> tuple[int, ...]:
    if group.kind == "state":
        return (count, *tensor.shape)
    return (count, group.entries_per_page, *tensor.shape)
