"""N-gram table rows straight from a checkpoint's mapped shards: for tests and offline use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.common.checkpoint import Checkpoint, CheckpointError
from services.common.ngram_table import TableLayout, find_tables
from services.engine.checkpoints.tensors import refuse_nan_codes
from services.engine.runtime.tables_api import TableSource

_CHUNK = 1 << 26


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """Rows that are there already."""

    rows: torch.Tensor

    def wait(self) -> torch.Tensor:
        """[T, heads * row_values] as stored: uint8 e4m3 codes, or bf16."""
        return self.rows


class LocalTable:
    """Serves one table from the files. Keeps `checkpoint` mapped; one caller."""

    def __init__(self, checkpoint: Checkpoint, layout: TableLayout, device: torch.device) -> None:
        self.layout = layout
        self._device = device
        # Moved as plain integers; e4m3 rows are one byte a value, bf16 rows two.
        self._item = np.dtype(f"u{layout.row_bytes // layout.row_values}")
        self._shards = [
            np.frombuffer(checkpoint.raw(s.name), dtype=self._item).reshape(s.shape)
            for s in layout.shards
        ]
        self._ends = np.cumsum([s.shape[0] for s in layout.shards])
        if layout.dtype == "F8_E4M3":
            self._refuse_nan_codes()

    @classmethod
    def open(
        cls, checkpoint: Checkpoint, name: str | None = None, device: torch.device | None = None
    ) -> LocalTable:
        """The table `name`, or the only one. CheckpointError when there is no such table."""
        tables = {t.name: t for t in find_tables(checkpoint)}
        if name is None and len(tables) == 1:
            name = next(iter(tables))
        if name not in tables:
            raise CheckpointError(
                f"no n-gram table {name}; there are {sorted(tables)}", file=checkpoint.folder
            )
        return cls(checkpoint, tables[name], device or torch.device("cpu"))

    def start_gather(self, row_ids: torch.Tensor) -> GatheredRows:
        """Rows for `row_ids` int64 [T, heads]; IndexError for an id outside the table."""
        ids = row_ids.cpu().numpy()
        if ids.size and (ids.min() < 0 or ids.max() >= self.layout.rows):
            raise IndexError(
                f"row ids {ids.min()}..{ids.max()} outside table {self.layout.name} of "
                f"{self.layout.rows} rows"
            )
        flat = ids.reshape(-1)
        rows = np.empty((flat.size, self.layout.row_values), dtype=self._item)
        owner = np.searchsorted(self._ends, flat, side="right")
        for shard in np.unique(owner):
            mine = owner == shard
            first = self._ends[shard] - len(self._shards[shard])
            rows[mine] = self._shards[shard][flat[mine] - first]
        stored = torch.from_numpy(rows.reshape(len(ids), ids.shape[1] * self.layout.row_values))
        if self.layout.dtype == "BF16":
            stored = stored.view(torch.bfloat16)
        return GatheredRows(stored.to(self._device))

    def _refuse_nan_codes(self) -> None:
        for info, shard in zip(self.layout.shards, self._shards, strict=True):
            flat = shard.reshape(-1)
            for start in range(0, flat.size, _CHUNK):
                codes = torch.from_numpy(flat[start : start + _CHUNK].copy())
                refuse_nan_codes(codes, info)


def local_tables(checkpoint: Checkpoint, device: torch.device | None = None) -> TableSource:
    """Every n-gram table of a checkpoint, from its files."""
    device = device or torch.device("cpu")
    return TableSource({t.name: LocalTable(checkpoint, t, device) for t in find_tables(checkpoint)})
