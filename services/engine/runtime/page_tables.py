"""Page tables of the sequences in flight, kept as tensors and updated by what a step adds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.engine.cache.spec import PageId
from services.engine.scheduler.plan import SequenceId


class PageTables:
    """One row per sequence and group; entries without a page hold -1. One caller."""

    def __init__(self, groups: Sequence[str], device: torch.device) -> None:
        self._groups = tuple(groups)
        self._device = device
        self._rows: dict[SequenceId, int] = {}
        self._free: list[int] = []
        self._lengths: dict[str, dict[SequenceId, int]] = {name: {} for name in self._groups}
        self._tables = {name: _empty(1, 1, device) for name in self._groups}

    def begin(self, sequence: SequenceId, freed: dict[str, int]) -> None:
        """An empty table; the first `freed[group]` entries are absent from the start."""
        row = self._free.pop() if self._free else len(self._rows)
        self._rows[sequence] = row
        for name in self._groups:
            self._grow(name, row + 1, 1)
            self._tables[name][row] = -1
            self._lengths[name][sequence] = freed.get(name, 0)

    def update(
        self, sequence: SequenceId, new: dict[str, tuple[PageId, ...]], freed: dict[str, int]
    ) -> None:
        """Append pages and take the first `freed[group]` ones out of the table."""
        row = self._rows[sequence]
        for name, pages in new.items():
            start = self._lengths[name][sequence]
            self._grow(name, row + 1, start + len(pages))
            ids = torch.tensor(pages, dtype=torch.int64, device=self._device)
            self._tables[name][row, start : start + len(pages)] = ids
            self._lengths[name][sequence] = start + len(pages)
        for name, count in freed.items():
            self._tables[name][row, :count] = -1

    def drop(self, sequence: SequenceId) -> None:
        """Forget a sequence."""
        self._free.append(self._rows.pop(sequence))
        for lengths in self._lengths.values():
            del lengths[sequence]

    def batch(self, sequences: Sequence[SequenceId]) -> dict[str, torch.Tensor]:
        """Tables of these sequences, int64 [B, P] per group, P the longest of them."""
        rows = [self._rows[s] for s in sequences]
        index = torch.tensor(rows, dtype=torch.int64, device=self._device)
        longest = {
            name: max(lengths[s] for s in sequences) for name, lengths in self._lengths.items()
        }
        return {name: self._tables[name][index, : longest[name]] for name in self._groups}

    def _grow(self, name: str, rows: int, columns: int) -> None:
        table = self._tables[name]
        if rows > table.shape[0] or columns > table.shape[1]:
            shape = (_doubled(table.shape[0], rows), _doubled(table.shape[1], columns))
            larger = _empty(*shape, self._device)
            larger[: table.shape[0], : table.shape[1]] = table
            self._tables[name] = larger


def _doubled(size: int, least: int) -> int:
    while size < least:
        size *= 2
    return size


def _empty(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.full((rows, columns), -1, dtype=torch.int64, device=device)
