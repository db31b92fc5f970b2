"""Where the rows of an n-gram table come from."""

from __future__ import annotations

from typing import Protocol

import torch

from services.engine.runtime.batch import PendingRows


class TableSource(Protocol):
    """Rows of one n-gram table by id. One caller."""

    def start_gather(self, row_ids: torch.Tensor) -> PendingRows:
        """Start fetching rows for `row_ids` int64 [T, heads]; returns at once.

        `wait()` of the answer gives [T, heads * row_values] in the order of the ids, as stored.
        Raises IndexError where an id lies outside the table.
        """
        ...
