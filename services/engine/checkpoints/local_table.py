"""N-gram table rows straight from a checkpoint's files: for tests and offline use."""

from __future__ import annotations

import torch

from services.common.checkpoint import Checkpoint, CheckpointError
from services.common.ngram.stored import StoredRows, check_rows
from services.common.ngram_table import TableLayout, find_tables
from services.engine.runtime.tables import MappedTable
from services.engine.runtime.tables_api import TableSource


class LocalTable(MappedTable):
    """One table from the files, read through and found sound when it is opened. One caller."""

    def __init__(self, layout: TableLayout, device: torch.device) -> None:
        check_rows(layout)
        super().__init__(layout, StoredRows(layout), device)

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
        return cls(tables[name], device or torch.device("cpu"))


def local_tables(checkpoint: Checkpoint, device: torch.device | None = None) -> TableSource:
    """Every n-gram table of a checkpoint, from its files."""
    device = device or torch.device("cpu")
    return TableSource({t.name: LocalTable(t, device) for t in find_tables(checkpoint)})
