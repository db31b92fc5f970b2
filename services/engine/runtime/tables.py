"""Rows of the n-gram tables: from our own mapping on the offload service's host, or by call.

`attach_tables` maps every table that the checkpoint has; the mapping outlives the offload
service. `RemoteTable` serves an engine on a host that has no table.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import torch
from warhorse.v1 import common_pb2, offload_pb2, offload_pb2_grpc, tensor_pb2

from services.common.errors import ServiceError, from_rpc_error
from services.common.grpc_client import connect
from services.common.ngram_table import HashParameters, TableLayout
from services.common.shm import MappedRegion, open_region

logger = logging.getLogger(__name__)

T = TypeVar("T")

INLINE_BYTES = 64 << 10  # largest answer of one Gather call
# A hand-over to the worker thread costs as much as copying this many rows.
_ROWS_AT_ONCE = 256
_CALL_SECONDS = 5.0
_RETRY_SECONDS = (0.1, 1.0)  # first and longest pause between attempts
_PASSING = (
    common_pb2.ERROR_REASON_ENGINE_LOST,  # nobody listens yet
    common_pb2.ERROR_REASON_LOADING,
    common_pb2.ERROR_REASON_DRAINING,
    common_pb2.ERROR_REASON_DEADLINE,
    common_pb2.ERROR_REASON_STALE_GENERATION,  # restarted between our two questions
)
# e4m3 values stay codes: no kernel sees a float8 type.
_TORCH_DTYPES = {
    tensor_pb2.DTYPE_F8_E4M3: torch.uint8,
    tensor_pb2.DTYPE_BF16: torch.bfloat16,
}


class _Rows:
    """Rows on their way; `future` gives uint8 [T * heads, row_bytes] on the host."""

    def __init__(
        self,
        future: Future[torch.Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        seconds: float | None = None,
    ) -> None:
        self._future = future
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._seconds = seconds

    def wait(self) -> torch.Tensor:
        """[T, heads * row_values] on the model's device, as stored: uint8 e4m3 codes, or bf16."""
        rows = self._future.result(self._seconds)
        return rows.view(self._dtype).view(self._shape).to(self._device, non_blocking=True)


class MappedTable:
    """A table in a read-only mapping of ours. One caller; gathers run in a thread of its own.

    Needs nothing from the offload service any more, dead or alive.
    """

    def __init__(
        self, table: offload_pb2.Table, region: MappedRegion, device: torch.device
    ) -> None:
        self._name = table.name
        self._rows = table.rows
        self._row_values = table.row_values
        self._dtype = _TORCH_DTYPES[table.dtype]
        self._device = device
        self._region = region
        end = table.offset + table.rows * table.row_bytes
        data = np.frombuffer(region.view[table.offset : end], dtype=np.uint8)
        self._data: npt.NDArray[np.uint8] | None = data.reshape(table.rows, table.row_bytes)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ngram-gather")

    def start_gather(self, row_ids: torch.Tensor) -> _Rows:
        """See `TableSource`."""
        ids, shape = _checked_ids(row_ids, self._rows, self._row_values)
        if ids.size <= _ROWS_AT_ONCE:
            future: Future[torch.Tensor] = Future()
            future.set_result(self._gather(ids))
        else:
            future = self._worker.submit(self._gather, ids)
        return _Rows(future, shape, self._dtype, self._device)

    def close(self) -> None:
        """Finish gathers and unmap. Idempotent."""
        self._worker.shutdown()
        if self._data is not None:
            self._data = None
            self._region.close()

    def _gather(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        if self._data is None:
            raise RuntimeError(f"table {self._name} is closed")
        shape = (ids.size, self._data.shape[1])
        out = torch.empty(shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        np.take(self._data, ids, axis=0, out=out.numpy(), mode="clip")  # ids are checked
        return out


class RemoteTable:
    """A table on another host, by Gather calls. One caller; calls run on a loop of its own.

    `wait` raises ServiceError when the service cannot be reached within `retry_seconds`.
    """

    def __init__(
        self,
        table: offload_pb2.Table,
        address: str,
        device: torch.device,
        retry_seconds: float = 10.0,
    ) -> None:
        self._table = table
        self._dtype = _TORCH_DTYPES[table.dtype]
        self._device = device
        self._retry_seconds = retry_seconds
        self._batch = max(1, INLINE_BYTES // table.row_bytes)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ngram-remote", daemon=True
        )
        self._thread.start()
        self._stub = asyncio.run_coroutine_threadsafe(self._connect(address), self._loop).result()

    def start_gather(self, row_ids: torch.Tensor) -> _Rows:
        """See `TableSource`."""
        ids, shape = _checked_ids(row_ids, self._table.rows, self._table.row_values)
        future = asyncio.run_coroutine_threadsafe(self._gather(ids), self._loop)
        return _Rows(future, shape, self._dtype, self._device)

    def close(self) -> None:
        """Close the connection and stop the loop. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._channel.close(None), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _connect(self, address: str) -> offload_pb2_grpc.OffloadServiceStub:
        self._channel = connect(address)
        return offload_pb2_grpc.OffloadServiceStub(self._channel)

    async def _gather(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        out = torch.empty((ids.size, self._table.row_bytes), dtype=torch.uint8)
        starts = range(0, ids.size, self._batch)
        await asyncio.gather(*(self._fill(out, ids, start) for start in starts))
        return out

    async def _fill(self, out: torch.Tensor, ids: npt.NDArray[np.int64], start: int) -> None:
        part = ids[start : start + self._batch]
        request = offload_pb2.GatherRequest(
            table=self._table.name,
            row_ids=part.astype("<i8").tobytes(),
            fingerprint=self._table.fingerprint,
        )
        answer = await retried(
            lambda: self._stub.Gather(request, timeout=_CALL_SECONDS), self._retry_seconds
        )
        rows = np.frombuffer(answer.rows.inline, dtype=np.uint8)
        out.numpy()[start : start + part.size] = rows.reshape(part.size, self._table.row_bytes)


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
    request = offload_pb2.AttachRequest(
        client_id=client_id, table=layout.name, fingerprint=layout.fingerprint
    )
    answer = await stub.Attach(request, timeout=_CALL_SECONDS)
    if len(answer.tables) != 1:
        raise _mismatch(layout, "tables", len(answer.tables), 1)
    table = answer.tables[0]
    check_table(table, layout)
    return MappedTable(table, open_region(table.region, run_dir), device)


def check_table(table: offload_pb2.Table, layout: TableLayout) -> None:
    """Raise LAYOUT_MISMATCH unless the served table is the one of our checkpoint."""
    dtype = {"F8_E4M3": tensor_pb2.DTYPE_F8_E4M3, "BF16": tensor_pb2.DTYPE_BF16}[layout.dtype]
    served = HashParameters(
        tuple(table.hash.multipliers),
        tuple(table.hash.head_sizes),
        tuple(table.hash.head_offsets),
        table.hash.ngram_size,
        table.hash.eos_token_id,
    )
    facts: tuple[tuple[str, object, object], ...] = (
        ("name", table.name, layout.name),
        ("fingerprint", table.fingerprint, layout.fingerprint),
        ("dtype", table.dtype, dtype),
        ("rows", table.rows, layout.rows),
        ("row_bytes", table.row_bytes, layout.row_bytes),
        ("row_values", table.row_values, layout.row_values),
        ("hash", served, layout.hash),
        ("offset", table.offset + layout.nbytes <= table.region.nbytes, True),
    )
    for field, found, wanted in facts:
        if found != wanted:
            raise _mismatch(layout, field, found, wanted)
    if not math.isclose(table.scale, layout.scale, rel_tol=1e-6):
        raise _mismatch(layout, "scale", table.scale, layout.scale)


async def retried(attempt: Callable[[], Awaitable[T]], seconds: float) -> T:
    """`attempt` until it succeeds, fails for good, or `seconds` are over."""
    deadline = time.monotonic() + seconds
    pause, longest = _RETRY_SECONDS
    while True:
        try:
            return await attempt()
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
            cause: Exception = error
        except ServiceError as error:
            failure = cause = error
        if failure.reason not in _PASSING or time.monotonic() + pause > deadline:
            raise failure from cause
        await asyncio.sleep(pause)
        pause = min(2 * pause, longest)


def _checked_ids(
    row_ids: torch.Tensor, rows: int, row_values: int
) -> tuple[npt.NDArray[np.int64], tuple[int, int]]:
    """Flat ids on the host, and the shape [T, heads * row_values] of their rows."""
    if row_ids.dtype != torch.int64 or row_ids.ndim != 2:
        raise ValueError(
            f"row ids are {row_ids.dtype} of {row_ids.ndim} dimensions, not int64 [T, heads]"
        )
    ids: npt.NDArray[np.int64] = row_ids.cpu().numpy().reshape(-1)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise IndexError(f"row ids {ids.min()} to {ids.max()}, the table has {rows} rows")
    return ids, (row_ids.shape[0], row_ids.shape[1] * row_values)


def _mismatch(layout: TableLayout, field: str, found: object, wanted: object) -> ServiceError:
    return ServiceError(
        common_pb2.ERROR_REASON_LAYOUT_MISMATCH,
        f"n-gram table {layout.name}: {field} is {found}, our checkpoint has {wanted}",
        field=field,
    )
