"""Tables in file regions: filled once from the checkpoint, taken over by every later life.

A table's file lies in the instance's table directory, under the table's name, and outlives the
process: it is what a restart adopts instead of reading the checkpoint again. It is adopted only
when its tag, a digest over the table's fingerprint and over path, size and time of every
checkpoint file that it came from, is the one expected now. Whoever ends the deployment removes the
directory (it lies in the run directory); files of other checkpoints are removed at start.
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

from services.common.checkpoint import Checkpoint, CheckpointError
from services.common.errors import StartupError
from services.common.ngram_table import TableLayout
from services.common.shm import Region, RegionMismatch

logger = logging.getLogger(__name__)

_SUFFIX = ".table"
_COPY_BYTES = 16 << 20
_NAN_CODE = 0x7F  # of e4m3, without its sign


@dataclass(frozen=True, slots=True)
class OpenTable:
    """A table ready to serve: `rows` uint8 [rows, row_bytes], read-only."""

    layout: TableLayout
    region: Region
    rows: npt.NDArray[np.uint8]
    adopted: bool


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
    checkpoint: Checkpoint, layouts: Iterable[TableLayout], folder: Path, owner: str
) -> tuple[OpenTable, ...]:
    """Adopt or load every table; removes the files of all others from `folder`.

    Raises StartupError when there is no room for a table.
    """
    layouts = tuple(layouts)
    names = {_file(folder, layout).name for layout in layouts}
    for path in folder.iterdir():
        if path.name not in names | {"lock"}:
            logger.info("removing an old table file", extra={"file": path.name})
            path.unlink()
    return tuple(_open_table(checkpoint, layout, folder, owner) for layout in layouts)


def _open_table(checkpoint: Checkpoint, layout: TableLayout, folder: Path, owner: str) -> OpenTable:
    path, tag = _file(folder, layout), _tag(layout)
    started = time.monotonic()
    try:
        region, adopted = Region.adopt(path, tag=tag), True
    except (FileNotFoundError, RegionMismatch) as reason:
        logger.info("loading a table", extra={"table": layout.name, "reason": str(reason)})
        region, adopted = _load(checkpoint, layout, path, owner, tag), False
    rows = region.array(np.uint8)[: layout.nbytes].reshape(layout.rows, layout.row_bytes)
    rows.flags.writeable = False
    logger.info(
        "table ready",
        extra={
            "table": layout.name,
            "bytes": layout.nbytes,
            "adopted": adopted,
            "seconds": round(time.monotonic() - started, 3),
        },
    )
    return OpenTable(layout, region, rows, adopted)


def _load(checkpoint: Checkpoint, layout: TableLayout, path: Path, owner: str, tag: str) -> Region:
    try:
        region = Region.from_file(path, layout.nbytes, owner=owner, tag=tag)
    except (OSError, MemoryError) as error:
        raise StartupError(
            f"no room for table {layout.name} of {layout.nbytes} bytes in {path.parent}: {error}"
        ) from error
    try:
        _copy_shards(checkpoint, layout, region.view)
        region.seal_read_only()
    except BaseException:
        region.close()
        region.remove_file()
        raise
    return region


def _copy_shards(checkpoint: Checkpoint, layout: TableLayout, out: memoryview) -> None:
    """Concatenate the shards. CheckpointError where an e4m3 shard holds a NaN."""
    start = 0
    for shard in layout.shards:
        refused = _NAN_CODE if layout.dtype == "F8_E4M3" else None
        bad = _copy(checkpoint.raw(shard.name), out[start : start + shard.nbytes], refused)
        if bad is not None:
            raise CheckpointError(
                f"NaN codes within bytes {bad} to {bad + _COPY_BYTES} of an e4m3 tensor",
                file=shard.file,
                tensor=shard.name,
            )
        start += shard.nbytes
        checkpoint.release_pages()


def _copy(data: memoryview, out: memoryview, refused: int | None) -> int | None:
    """Copy; stops at a piece with a byte that is `refused` but for its sign bit: its position."""
    source, target = np.frombuffer(data, np.uint8), np.frombuffer(out, np.uint8)
    for at in range(0, source.size, _COPY_BYTES):
        piece = source[at : at + _COPY_BYTES]
        if refused is not None and np.bitwise_and(piece, 0x7F).max() == refused:
            return at
        target[at : at + piece.size] = piece
    return None


def _file(folder: Path, layout: TableLayout) -> Path:
    return folder / f"{layout.name}{_SUFFIX}"


def _tag(layout: TableLayout) -> str:
    files = sorted({shard.file.resolve() for shard in layout.shards})
    facts = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps([layout.fingerprint, facts]).encode()).hexdigest()
