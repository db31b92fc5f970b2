"""`warhorse.v1.OffloadService` over the open tables."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from warhorse.v1 import common_pb2, offload_pb2, offload_pb2_grpc, tensor_pb2

from services.common.describe import service_info
from services.common.errors import ServiceError
from services.common.metrics import Reading, single
from services.common.shm import region_counts
from services.offload.tables import OpenTable

SERVICE_NAME = "warhorse.v1.OffloadService"
INLINE_BYTES = 64 << 10  # largest inline payload of a Tensor


@dataclass(frozen=True, slots=True)
class Served:
    """An open table and what we say about it."""

    table: OpenTable
    message: offload_pb2.Table


class OffloadServicer(offload_pb2_grpc.OffloadServiceServicer):
    """Describes tables and gathers rows for callers without a mapping. Runs on one event loop."""

    def __init__(self, instance: str, generation: int, tables: Sequence[Served]) -> None:
        self._instance = instance
        self._generation = generation
        self._tables = {t.message.name: t for t in tables}
        self._gathered_rows = 0

    def readings(self) -> tuple[Reading, ...]:
        """What the metrics of the process show."""
        tables = [(name, served.table.layout.nbytes) for name, served in self._tables.items()]
        return (
            Reading("warhorse:table_bytes", "Bytes of a table", "gauge",
                    lambda: [((name,), float(nbytes)) for name, nbytes in tables], ("table",)),
            Reading("warhorse:table_gathered_rows", "Rows gathered for other hosts", "counter",
                    single(lambda: self._gathered_rows)),
        )  # fmt: skip

    async def Attach(  # noqa: N802
        self, request: offload_pb2.AttachRequest, context: Any
    ) -> offload_pb2.AttachResponse:
        """Where the tables are; refused when the caller expects another one."""
        served = [self._find(request.table)] if request.table else list(self._tables.values())
        for table in served:
            _require_fingerprint(table, request.fingerprint)
        return offload_pb2.AttachResponse(tables=[t.message for t in served])

    async def Gather(  # noqa: N802
        self, request: offload_pb2.GatherRequest, context: Any
    ) -> offload_pb2.GatherResponse:
        """Rows by id, inline."""
        served = self._find(request.table)
        _require_fingerprint(served, request.fingerprint)
        layout = served.table.layout
        if len(request.row_ids) % 8:
            raise _invalid("row_ids", f"{len(request.row_ids)} bytes, not a multiple of 8")
        ids = np.frombuffer(request.row_ids, dtype="<i8")
        limit = INLINE_BYTES // layout.row_bytes
        if ids.size > limit:
            raise _invalid("row_ids", f"{ids.size} ids, at most {limit} fit one answer")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < layout.rows:
            raise _invalid(
                "row_ids", f"ids {ids.min()} to {ids.max()}, accepted are 0 to {layout.rows - 1}"
            )
        # In a thread: rows of a table on disk may have to be read first.
        rows = await asyncio.to_thread(_rows, served.table, ids)
        self._gathered_rows += ids.size
        tensor = tensor_pb2.Tensor(
            dtype=tensor_pb2.DTYPE_U8, shape=[ids.size, layout.row_bytes], inline=rows
        )
        return offload_pb2.GatherResponse(rows=tensor)

    async def DescribeOffload(  # noqa: N802
        self, request: offload_pb2.DescribeOffloadRequest, context: Any
    ) -> offload_pb2.DescribeOffloadResponse:
        """What is served, and counters."""
        regions, region_bytes = region_counts()
        return offload_pb2.DescribeOffloadResponse(
            service=service_info(self._instance, self._generation),
            tables=[t.message for t in self._tables.values()],
            gathered_rows=self._gathered_rows,
            open_regions=regions,
            region_bytes=region_bytes,
        )

    def _find(self, name: str) -> Served:
        served = self._tables.get(name)
        if served is None:
            names = ", ".join(sorted(self._tables)) or "none"
            raise ServiceError(
                common_pb2.ERROR_REASON_LAYOUT_MISMATCH,
                f"no table {name}; served: {names}",
                field="table",
            )
        return served


def _rows(table: OpenTable, ids: npt.NDArray[np.int64]) -> bytes:
    rows = np.empty((ids.size, table.layout.row_bytes), np.uint8)
    table.reader.take(ids, rows)
    return rows.tobytes()


def _require_fingerprint(served: Served, expected: str) -> None:
    if expected and expected != served.message.fingerprint:
        raise ServiceError(
            common_pb2.ERROR_REASON_LAYOUT_MISMATCH,
            f"table {served.message.name} comes from another checkpoint",
            field="fingerprint",
        )


def _invalid(field: str, message: str) -> ServiceError:
    return ServiceError(common_pb2.ERROR_REASON_INVALID_FIELD, message, field=field)
