"""Tables ready to serve: copied once into file regions, or left in the checkpoint's files.

What a life has done outlives it in the instance's table directory, under the table's name: the
region itself (`.table`), or a note that every stored row was read and is sound (`.checked`). A
restart takes it over instead of reading the checkpoint again, when its tag is the one expected
now: a digest over the table's fingerprint and over path, size and time of every checkpoint file
that the table comes from. Whoever ends the deployment removes the directory (it lies in the run
directory); files of other checkpoints, and of the other storage, are removed at start.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.common.errors import StartupError
from services.common.ngram.stored import (
    Bytes,
    RowReader,
    StoredRows,
    check_rows,
    copy_rows,
)
from services.common.ngram_table import TableLayout
from services.common.shm import Region, RegionMismatch
from services.offload.config import Storage

logger = logging.getLogger(__name__)

_SUFFIX: dict[Storage, str] = {"memory": ".table", "file": ".checked"}


@dataclass(frozen=True, slots=True)
class OpenTable:
    """A table ready to serve. `region` is None where it stays in the checkpoint's files."""

    layout: TableLayout
    reader: RowReader
    region: Region | None
    adopted: bool

    def close(self) -> None:
        """Unmap; what a later life adopts stays."""
        self.reader.close()
        if self.region is not None:
            self.region.close()


class RegionRows:
    """Rows of a table in a region of ours."""

    def __init__(self, region: Region, layout: TableLayout) -> None:
        self._rows: Bytes = table_rows(region, layout)

    def take(self, ids: npt.NDArray[np.int64], out: Bytes) -> None:
        """See `RowReader`."""
        np.take(self._rows, ids, axis=0, out=out, mode="clip")

    def close(self) -> None:
        """See `RowReader`; the region is closed by its owner."""
        self._rows = np.empty((0, 0), np.uint8)


def table_rows(region: Region, layout: TableLayout) -> Bytes:
    """The rows uint8 [rows, row_bytes] of a table that starts with its region."""
    return region.array(np.uint8)[: layout.nbytes].reshape(layout.rows, layout.row_bytes)


@contextmanager
def owned_directory(folder: Path) -> Iterator[Path]:
    """Make `folder` and hold its lock: two instances must not fill the same files."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(f"{folder} is in use by another offload process") from None
        yield folder
    finally:
        os.close(fd)


def open_tables(
    layouts: Iterable[TableLayout], storage: Storage, folder: Path, owner: str
) -> tuple[OpenTable, ...]:
    """Adopt or load every table; removes all other files from `folder`.

    Raises StartupError when there is no room for a table, CheckpointError when stored rows are
    damaged.
    """
    layouts = tuple(layouts)
    names = {_file(folder, layout, storage).name for layout in layouts}
    for path in folder.iterdir():
        if path.name not in names | {"lock"}:
            logger.info("removing an old table file", extra={"file": path.name})
            path.unlink()
    return tuple(_open_table(layout, storage, folder, owner) for layout in layouts)


def _open_table(layout: TableLayout, storage: Storage, folder: Path, owner: str) -> OpenTable:
    path, tag = _file(folder, layout, storage), _tag(layout)
    started = time.monotonic()
    if storage == "memory":
        table = _in_memory(layout, path, owner, tag)
    else:
        table = _in_files(layout, path, tag)
    logger.info(
        "table ready",
        extra={
            "table": layout.name,
            "bytes": layout.nbytes,
            "storage": storage,
            "adopted": table.adopted,
            "seconds": round(time.monotonic() - started, 3),
        },
    )
    return table


def _in_memory(layout: TableLayout, path: Path, owner: str, tag: str) -> OpenTable:
    try:
        region, adopted = Region.adopt(path, tag=tag), True
    except (FileNotFoundError, RegionMismatch) as reason:
        logger.info("loading a table", extra={"table": layout.name, "reason": str(reason)})
        region, adopted = _load(layout, path, owner, tag), False
    return OpenTable(layout, RegionRows(region, layout), region, adopted)


def _load(layout: TableLayout, path: Path, owner: str, tag: str) -> Region:
    try:
        region = Region.from_file(path, layout.nbytes, owner=owner, tag=tag)
    except (OSError, MemoryError) as error:
        raise StartupError(
            f"no room for table {layout.name} of {layout.nbytes} bytes in {path.parent}: {error}; "
            "--table-storage file serves it from the checkpoint's files"
        ) from error
    try:
        copy_rows(layout, table_rows(region, layout))
        region.seal_read_only()
    except BaseException:
        region.close()
        region.remove_file()
        raise
    return region


def _in_files(layout: TableLayout, path: Path, tag: str) -> OpenTable:
    adopted = path.exists() and path.read_text() == tag
    if not adopted:
        logger.info("checking a table", extra={"table": layout.name})
        check_rows(layout)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(tag)
        partial.replace(path)
    return OpenTable(layout, StoredRows(layout), None, adopted)


def _file(folder: Path, layout: TableLayout, storage: Storage) -> Path:
    return folder / f"{layout.name}{_SUFFIX[storage]}"


def _tag(layout: TableLayout) -> str:
    files = sorted({stored.file.resolve() for stored in layout.tensors})
    facts = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps([layout.fingerprint, facts]).encode()).hexdigest()
