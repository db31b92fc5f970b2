"""Where the rows of n-gram tables come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from services.engine.runtime.batch import PendingRows


class TableRows(Protocol):
    """Rows of one n-gram table by id. One caller."""

    def start_gather(self, row_ids: torch.Tensor) -> PendingRows:
        """Start fetching rows for `row_ids` int64 [T, heads]; returns at once.

        `wait()` of the answer gives [T, heads * values of a row] in the order of the ids, as
        stored; where rows have scales, a row's bytes are its values, then its scales.
        Raises IndexError where an id lies outside the table.
        """
        ...


@dataclass(frozen=True, slots=True)
class TableSource:
    """The n-gram tables of one model, by name.

    `watched` may put something around what is on its way: it gets table, number of rows, rows.
    """

    tables: Mapping[str, TableRows]
    watched: Callable[[str, int, PendingRows], PendingRows] | None = None

    def start_gather(self, table: str, row_ids: torch.Tensor) -> PendingRows:
        """See `TableRows.start_gather`; KeyError for a table that is not there."""
        rows = self.tables[table].start_gather(row_ids)
        return rows if self.watched is None else self.watched(table, row_ids.numel(), rows)
