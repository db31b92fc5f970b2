"""Rows of a table as they lie in the checkpoint: read through once, or gathered in place."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.common.checkpoint import CheckpointError, TensorInfo
from services.common.ngram.layout import TableLayout

Bytes = npt.NDArray[np.uint8]

_PIECE_BYTES = 8 << 20  # read and checked at a time
_READ_THREADS = 4
# A gather from disk waits for pages, so it is split over threads: up to so many, and each at least
# so many rows.
_GATHER_THREADS = 32
_GATHER_ROWS = 4
_NAN_CODE = 0x7F  # of e4m3, without its sign
_NAN_SCALE = 0xFF  # of ue8m0


class RowReader(Protocol):
    """Rows of one table by id."""

    def take(self, ids: npt.NDArray[np.int64], out: Bytes) -> None:
        """Put rows `ids` [n], all within the table, into `out` [n, row_bytes]."""
        ...

    def close(self) -> None:
        """Give the memory back. Idempotent; `take` must not be called after it."""
        ...


class StoredRows:
    """Gathers rows from mapped checkpoint files, scales behind their values. Any thread.

    Maps only the table's tensors, for random access; pages belong to the page cache and are shared
    with every process that maps the same file.
    """

    def __init__(self, layout: TableLayout) -> None:
        self._code_bytes = layout.code_bytes
        self._codes = [_mapped(shard) for shard in layout.shards]
        self._scales = [_mapped(shard) for shard in layout.scale_shards]
        self._ends = np.cumsum([len(rows) for rows in self._codes])
        self._workers = ThreadPoolExecutor(_GATHER_THREADS, thread_name_prefix="ngram-rows")

    def take(self, ids: npt.NDArray[np.int64], out: Bytes) -> None:
        """See `RowReader`."""
        each = max(_GATHER_ROWS, -(-ids.size // _GATHER_THREADS))
        if ids.size <= each:
            return self._take(ids, out)
        parts = [slice(at, at + each) for at in range(0, ids.size, each)]
        for _ in self._workers.map(lambda part: self._take(ids[part], out[part]), parts):
            pass
        return None

    def close(self) -> None:
        """See `RowReader`. The files are unmapped with the last use of their rows."""
        self._workers.shutdown()
        self._codes, self._scales = [], []

    def _take(self, ids: npt.NDArray[np.int64], out: Bytes) -> None:
        self._take_from(self._codes, ids, out[:, : self._code_bytes])
        if self._scales:
            self._take_from(self._scales, ids, out[:, self._code_bytes :])

    def _take_from(self, shards: Sequence[Bytes], ids: npt.NDArray[np.int64], out: Bytes) -> None:
        if len(shards) == 1:
            np.take(shards[0], ids, axis=0, out=out, mode="clip")
            return
        owner = np.searchsorted(self._ends, ids, side="right")
        for number in np.unique(owner):
            mine = owner == number
            first = self._ends[number] - len(shards[number])
            out[mine] = np.take(shards[number], ids[mine] - first, axis=0)


def check_rows(layout: TableLayout) -> None:
    """Read the whole table; CheckpointError names a tensor that holds a NaN or is cut short.

    0x7F and 0xFF are the NaN codes of e4m3, 0xFF that of ue8m0.
    """
    _read(layout, None)


def copy_rows(layout: TableLayout, out: Bytes) -> None:
    """Fill `out` uint8 [rows, row_bytes]; raises as `check_rows`."""
    _read(layout, out)


def _read(layout: TableLayout, out: Bytes | None) -> None:
    each = max(1, _PIECE_BYTES // layout.row_bytes)
    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="ngram-load") as workers:
        start = 0
        for number, shard in enumerate(layout.shards):
            rows = shard.shape[0]
            target = None if out is None else out[start : start + rows]
            stored = [shard, *layout.scale_shards[number : number + 1]]
            for _ in workers.map(partial(_read_rows, stored, each, target), range(0, rows, each)):
                pass
            start += rows


def _read_rows(stored: Sequence[TensorInfo], most: int, out: Bytes | None, first: int) -> None:
    """Read, check and keep up to `most` rows from `first` on: values, then their scales."""
    column = 0
    for info in stored:
        piece = _piece(info, first, min(most, info.shape[0] - first))
        if out is not None:
            out[first : first + len(piece), column : column + piece.shape[1]] = piece
        column += piece.shape[1]


def _piece(info: TensorInfo, first: int, rows: int) -> Bytes:
    """Rows `first` to `first + rows` of a stored matrix, uint8 [rows, bytes], checked."""
    width = info.nbytes // info.shape[0]
    piece = np.empty((rows, width), np.uint8)
    with info.file.open("rb", buffering=0) as file:
        file.seek(info.offset + first * width)
        found = file.readinto(piece.data.cast("B"))
    place = f"rows {first} to {first + rows - 1}"
    if found != piece.nbytes:
        raise CheckpointError(
            f"the file ends within {place}",
            file=info.file,
            tensor=info.name,
            expected_bytes=info.offset + info.nbytes,
            found_bytes=info.file.stat().st_size,
        )
    if _holds_nan(piece, info.dtype):
        raise CheckpointError(
            f"NaN codes of {info.dtype} within {place}", file=info.file, tensor=info.name
        )
    return piece


def _holds_nan(piece: Bytes, dtype: str) -> bool:
    if dtype == "F8_E4M3":
        return int(np.bitwise_and(piece, 0x7F).max()) == _NAN_CODE
    return dtype == "F8_E8M0" and int(piece.max()) == _NAN_SCALE


def _mapped(info: TensorInfo) -> Bytes:
    """The rows uint8 [rows, bytes] of a stored matrix, read-only."""
    start = info.offset - info.offset % mmap.ALLOCATIONGRANULARITY
    skipped = info.offset - start
    with info.file.open("rb") as file:
        mapped = mmap.mmap(
            file.fileno(), skipped + info.nbytes, access=mmap.ACCESS_READ, offset=start
        )
    mapped.madvise(mmap.MADV_RANDOM)
    data = np.frombuffer(mapped, dtype=np.uint8, count=info.nbytes, offset=skipped)
    return data.reshape(info.shape[0], -1)
