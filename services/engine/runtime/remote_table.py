"""An n-gram table on another host, by Gather calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import torch
from warhorse.v1 import common_pb2, offload_pb2, offload_pb2_grpc

from services.common.errors import ServiceError, from_rpc_error
from services.common.grpc_client import connect
from services.common.ngram_table import TableLayout
from services.engine.runtime.table_rows import GatheredRows, checked_ids

T = TypeVar("T")

INLINE_BYTES = 64 << 10  # largest answer of one Gather call
CALL_SECONDS = 5.0
_RETRY_SECONDS = (0.1, 1.0)  # first and longest pause between attempts
_PASSING = (
    common_pb2.ERROR_REASON_ENGINE_LOST,  # nobody listens yet
    common_pb2.ERROR_REASON_LOADING,
    common_pb2.ERROR_REASON_DRAINING,
    common_pb2.ERROR_REASON_DEADLINE,
    common_pb2.ERROR_REASON_STALE_GENERATION,  # restarted between our two questions
)


class RemoteTable:
    """A table on another host, by Gather calls. One caller; calls run on a loop of its own.

    `wait` raises ServiceError when the service cannot be reached within `retry_seconds`.
    """

    def __init__(
        self,
        layout: TableLayout,
        address: str,
        device: torch.device,
        retry_seconds: float = 10.0,
    ) -> None:
        self._layout = layout
        self._device = device
        self._retry_seconds = retry_seconds
        self._batch = max(1, INLINE_BYTES // layout.row_bytes)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ngram-remote", daemon=True
        )
        self._thread.start()
        self._stub = asyncio.run_coroutine_threadsafe(self._connect(address), self._loop).result()

    def start_gather(self, row_ids: torch.Tensor) -> GatheredRows:
        """See `TableRows`."""
        ids, shape = checked_ids(row_ids, self._layout)
        future = asyncio.run_coroutine_threadsafe(self._gather(ids), self._loop)
        return GatheredRows(future, shape, self._layout, self._device)

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
        out = torch.empty((ids.size, self._layout.row_bytes), dtype=torch.uint8)
        starts = range(0, ids.size, self._batch)
        await asyncio.gather(*(self._fill(out, ids, start) for start in starts))
        return out

    async def _fill(self, out: torch.Tensor, ids: npt.NDArray[np.int64], start: int) -> None:
        part = ids[start : start + self._batch]
        request = offload_pb2.GatherRequest(
            table=self._layout.name,
            row_ids=part.astype("<i8").tobytes(),
            fingerprint=self._layout.fingerprint,
        )
        answer = await retried(
            lambda: self._stub.Gather(request, timeout=CALL_SECONDS), self._retry_seconds
        )
        rows = np.frombuffer(answer.rows.inline, dtype=np.uint8)
        out.numpy()[start : start + part.size] = rows.reshape(part.size, self._layout.row_bytes)


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
