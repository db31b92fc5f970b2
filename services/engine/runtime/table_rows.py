"""What the tables of a host and of another have in common: ids checked, rows on their way."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
import torch

from services.common.ngram_table import TableLayout


class GatheredRows:
    """Rows on their way; `future` gives uint8 [T * heads, row_bytes] on the host."""

    def __init__(
        self,
        future: Future[torch.Tensor],
        shape: tuple[int, int],
        layout: TableLayout,
        device: torch.device,
        seconds: float | None = None,
    ) -> None:
        self._future = future
        self._shape = shape
        self._dtype = stored_dtype(layout)
        self._device = device
        self._seconds = seconds

    def wait(self) -> torch.Tensor:
        """[T, heads * values of a row] on the model's device, as stored.

        uint8 e4m3 codes, each row's scales behind them where it has scales, or bf16.
        """
        rows = self._future.result(self._seconds)
        return rows.view(self._dtype).view(self._shape).to(self._device, non_blocking=True)


def stored_dtype(layout: TableLayout) -> torch.dtype:
    """What rows are handed out as: no kernel sees a float8 type, e4m3 values stay codes."""
    return torch.bfloat16 if layout.dtype == "BF16" else torch.uint8


def checked_ids(
    row_ids: torch.Tensor, layout: TableLayout
) -> tuple[npt.NDArray[np.int64], tuple[int, int]]:
    """Flat ids on the host, and the shape [T, heads * values of a row] of their rows."""
    if row_ids.dtype != torch.int64 or row_ids.ndim != 2:
        raise ValueError(
            f"row ids are {row_ids.dtype} of {row_ids.ndim} dimensions, not int64 [T, heads]"
        )
    ids: npt.NDArray[np.int64] = row_ids.cpu().numpy().reshape(-1)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < layout.rows:
        raise IndexError(
            f"row ids {ids.min()} to {ids.max()}, table {layout.name} has {layout.rows} rows"
        )
    width = layout.row_bytes // stored_dtype(layout).itemsize
    return ids, (row_ids.shape[0], row_ids.shape[1] * width)
