"""Rows of the n-gram tables of this host: from our own mapping of what the offload service serves.

`attach_tables` maps every table that the checkpoint has: the service's region, or the checkpoint's
own files where the service leaves the rows there. The mapping outlives the service.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from warhorse.v1 import common_pb2, offload_pb2, offload_pb2_grpc

from services.common.errors import ServiceError
from services.common.grpc_client import connect
from services.common.ngram.message import table_message
from services.common.ngram.stored import Bytes, RowReader, StoredRows
from services.common.ngram_table import TableLayout
from services.common.shm import MappedRegion, open_region
from services.engine.runtime.remote_table import CALL_SECONDS, retried
from services.engine.runtime.table_rows import GatheredRows, checked_ids

logger = logging.getLogger(__name__)

# A hand-over to the worker thread costs as much as copying this many rows.
_ROWS_AT_ONCE = 256
# Every field of a served table but where it lies, in the order in which they are compared.
_FACTS = (
    "name",
    "fingerprint",
    "dtype",
    "rows",
    "row_bytes",
    "row_values",
    "row_scale_bytes",
    "scale",
    "hash",
    "engram_hash",
)


class RegionRows:
    """Rows of a table in a region of the offload service. Owns our mapping of it."""

    def __init__(self, region: MappedRegion, offset: int, layout: TableLayout) -> None:
        self.region = region
        data = np.frombuffer(region.view[offset : offset + layout.nbytes], dtype=np.uint8)
        self._rows: Bytes = data.reshape(layout.rows, layout.row_bytes)

    def take(self, ids: npt.NDArray[np.int64], out: Bytes) -> None:
        """See `RowReader`."""
        np.take(self._rows, ids, axis=0, out=out, mode="clip")

    def close(self) -> None:
        """See `RowReader`."""
        self._rows = np.empty((0, 0), np.uint8)
        self.region.close()


class MappedTable:
    """A table in a read-only mapping of ours. One caller; gathers run in a thread of its own.

    Owns `reader`. Needs nothing from the offload service any more, dead or alive.
    """

    def __init__(self, layout: TableLayout, reader: RowReader, device: torch.device) -> None:
        self.layout = layout
        self._reader: RowReader | None = reader
        self._device = device
        # Pages in memory are copied at once, rows of a file may have to be waited for.
        self._at_once = 0 if isinstance(reader, StoredRows) else _ROWS_AT_ONCE
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ngram-gather")

    def start_gather(self, row_ids: torch.Tensor) -> GatheredRows:
        """See `TableRows`."""
        ids, shape = checked_ids(row_ids, self.layout)
        if ids.size <= self._at_once:
            future: Future[torch.Tensor] = Future()
            future.set_result(self._gather(ids))
        else:
            future = self._worker.submit(self._gather, ids)
        return GatheredRows(future, shape, self.layout, self._device)

    def close(self) -> None:
        """Finish gathers and unmap. Idempotent."""
        self._worker.shutdown()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _gather(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        if self._reader is None:
            raise RuntimeError(f"table {self.layout.name} is closed")
        shape = (ids.size, self.layout.row_bytes)
        out = torch.empty(shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._reader.take(ids, out.numpy())  # ids are checked
        return out


async def attach_tables(
    address: str,
    run_dir: Path,
    expected: Sequence[TableLayout],
    *,
    client_id: str,
    device: torch.device,
    retry_seconds: float = 120.0,
) -> dict[str, MappedTable]:
    """Map the tables that our checkpoint has, by name.

    Waits up to `retry_seconds` for a service that is not up yet. Raises ServiceError:
    LAYOUT_MISMATCH when a table is missing, or differs from our checkpoint's in fingerprint,
    shape, type, scale or hash; the last failure when the time is over.
    """
    if not expected:
        return {}
    async with connect(address) as channel:
        stub = offload_pb2_grpc.OffloadServiceStub(channel)
        attached: dict[str, MappedTable] = {}
        try:
            for layout in expected:
                attach = partial(_attach, stub, run_dir, layout, client_id, device)
                attached[layout.name] = await retried(attach, retry_seconds)
        except BaseException:
            for table in attached.values():
                table.close()
            raise
    logger.info("n-gram tables attached", extra={"tables": sorted(attached)})
    return attached


async def _attach(
    stub: offload_pb2_grpc.OffloadServiceStub,
    run_dir: Path,
    layout: TableLayout,
    client_id: str,
    device: torch.device,
) -> MappedTable:
    table = await served_table(stub, layout, client_id)
    if table.storage == offload_pb2.TABLE_STORAGE_FILE:
        return MappedTable(layout, StoredRows(layout), device)
    region = open_region(table.region, run_dir)
    return MappedTable(layout, RegionRows(region, table.offset, layout), device)


async def served_table(
    stub: offload_pb2_grpc.OffloadServiceStub, layout: TableLayout, client_id: str
) -> offload_pb2.Table:
    """What the service says of our table, found equal to `layout`."""
    request = offload_pb2.AttachRequest(
        client_id=client_id, table=layout.name, fingerprint=layout.fingerprint
    )
    answer = await stub.Attach(request, timeout=CALL_SECONDS)
    if len(answer.tables) != 1:
        raise _mismatch(layout, "tables", len(answer.tables), 1)
    table: offload_pb2.Table = answer.tables[0]
    check_table(table, layout)
    return table


def check_table(table: offload_pb2.Table, layout: TableLayout) -> None:
    """Raise LAYOUT_MISMATCH unless the served table is the one of our checkpoint."""
    wanted = table_message(layout, table.storage)
    for field in _FACTS:
        if getattr(table, field) != getattr(wanted, field):
            raise _mismatch(layout, field, getattr(table, field), getattr(wanted, field))
    match table.storage:
        case offload_pb2.TABLE_STORAGE_MEMORY:
            if table.offset + layout.nbytes > table.region.nbytes:
                raise _mismatch(
                    layout, "offset", table.offset, f"{layout.nbytes} bytes within its region"
                )
        case offload_pb2.TABLE_STORAGE_FILE:
            pass
        case other:
            raise _mismatch(layout, "storage", other, "memory or file")


def _mismatch(layout: TableLayout, field: str, found: object, wanted: object) -> ServiceError:
    return ServiceError(
        common_pb2.ERROR_REASON_LAYOUT_MISMATCH,
        f"n-gram table {layout.name}: {field} is {found}, our checkpoint has {wanted}",
        field=field,
    )
