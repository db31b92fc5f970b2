"""Copies page and slot contents between the pools and plain bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.engine.cache.spec import CacheGroup, CachePools, PageId, SlotId


class PageMover:
    """Reads and writes the objects of the external store in the pools.

    An object is one prefix unit of one group: the bytes of the group's tensors one after the
    other, each with the entries of all pages of the unit in order (state groups: of the one slot).
    Any thread may call, as long as nobody else touches the ids meanwhile.
    """

    def __init__(self, pools: CachePools, groups: tuple[CacheGroup, ...], unit_tokens: int) -> None:
        self.pools = pools
        self.groups = groups
        self.unit_tokens = unit_tokens
        self._groups = {g.name: g for g in groups}

    def unit_pages(self, group: str) -> int:
        """Ids of one object: pages of a unit, or 1 slot."""
        g = self._groups[group]
        return 1 if g.kind == "state" else self.unit_tokens // g.page_tokens

    def window_units(self, group: str) -> int:
        """Units that a hit needs of a window group; 0 for other kinds."""
        g = self._groups[group]
        return -(-g.window_tokens // self.unit_tokens) if g.kind == "window" else 0

    def object_bytes(self, group: str) -> int:
        """Size of one object in bytes."""
        return self.unit_pages(group) * self._groups[group].page_bytes

    def write_out(self, group: str, ids: Sequence[PageId | SlotId], out: memoryview) -> None:
        """Copy the contents of `ids` into `out`, object_bytes(group) writable bytes."""
        target = np.frombuffer(out, dtype=np.uint8)
        for pages, part in self._parts(group, ids, target):
            index = torch.tensor(ids, dtype=torch.int64, device=pages.device)
            part[...] = pages[index].cpu().numpy()

    def read_in(self, group: str, ids: Sequence[PageId | SlotId], data: memoryview) -> None:
        """Copy `data`, object_bytes(group) bytes, into the pages or the slot `ids`."""
        source = np.frombuffer(data, dtype=np.uint8)
        for pages, part in self._parts(group, ids, source):
            index = torch.tensor(ids, dtype=torch.int64, device=pages.device)
            pages[index] = torch.from_numpy(part.copy()).to(pages.device)

    def _parts(
        self, group: str, ids: Sequence[PageId | SlotId], data: npt.NDArray[np.uint8]
    ) -> Iterator[tuple[torch.Tensor, npt.NDArray[np.uint8]]]:
        """Per tensor: all pages as bytes [pages, page bytes], its part of `data` [ids, same]."""
        if len(ids) != self.unit_pages(group) or data.nbytes != self.object_bytes(group):
            raise ValueError(
                f"cache group {group}: an object is {self.unit_pages(group)} ids and "
                f"{self.object_bytes(group)} bytes, got {len(ids)} ids and {data.nbytes} bytes"
            )
        start = 0
        for tensor in self.pools[group].values():
            pages = tensor.view(tensor.shape[0], -1).view(torch.uint8)
            end = start + len(ids) * pages.shape[1]
            yield pages, data[start:end].reshape(len(ids), -1)
            start = end
