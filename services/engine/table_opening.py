"""Where the engine's n-gram rows come from: the offload service of this host, of another, or the
checkpoint's own files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.offload_pb2 import Table
from warhorse.v1.offload_pb2_grpc import OffloadServiceStub

from services.common.checkpoint import Checkpoint
from services.common.errors import ServiceError, StartupError
from services.common.grpc_client import connect, socket_target
from services.common.ngram_table import TableLayout, find_tables
from services.engine.checkpoints.local_table import LocalTable
from services.engine.flags import EngineFlags
from services.engine.models.base import NgramHash
from services.engine.runtime.remote_table import RemoteTable, retried
from services.engine.runtime.tables import attach_tables, served_table
from services.engine.runtime.tables_api import TableSource

NO_PEER = "none"
ATTACH_SECONDS = 120.0

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """Something with an end."""

    def close(self) -> None: ...


@dataclass
class Tables:
    """The tables of the model (None where it has none) and what to close in the end."""

    source: TableSource | None = None
    from_offload: bool = False
    held: list[Closable] = field(default_factory=list)

    def close(self) -> None:
        """Unmap and disconnect."""
        while self.held:
            self.held.pop().close()


def open_tables(flags: EngineFlags, ngrams: Sequence[NgramHash], device: torch.device) -> Tables:
    """The rows that `ngrams` ask for.

    An address of a Unix socket means this host: the table is mapped. Raises StartupError where
    the served table is not the checkpoint's, ServiceError where nobody answers in time.
    """
    if not ngrams:
        return Tables()
    names = {n.table for n in ngrams}
    with Checkpoint.open(flags.model) as checkpoint:
        layouts = [t for t in find_tables(checkpoint) if t.name in names]
    if flags.offload_address == NO_PEER:
        logger.warning("no offload service: n-gram rows are read from the checkpoint's files")
        local = {t.name: LocalTable(t, device) for t in layouts}
        return Tables(TableSource(local), held=[*local.values()])
    address = flags.offload_address or socket_target(flags.run_dir.absolute(), "offload")
    try:
        return asyncio.run(_from_offload(flags, address, layouts, device))
    except ServiceError as error:
        if error.reason == ErrorReason.ERROR_REASON_LAYOUT_MISMATCH:
            raise StartupError(error.message) from error
        raise


async def _from_offload(
    flags: EngineFlags, address: str, layouts: list[TableLayout], device: torch.device
) -> Tables:
    if not address.startswith("unix:"):
        remote = {t.name: await _remote(address, t, flags.instance, device) for t in layouts}
        return Tables(TableSource(remote), from_offload=True, held=[*remote.values()])
    mapped = await attach_tables(
        address,
        flags.run_dir.absolute(),
        layouts,
        client_id=flags.instance,
        device=device,
        retry_seconds=ATTACH_SECONDS,
    )
    return Tables(TableSource(mapped), from_offload=True, held=[*mapped.values()])


async def _remote(
    address: str, layout: TableLayout, client_id: str, device: torch.device
) -> RemoteTable:
    async def find() -> Table:
        async with connect(address) as channel:
            return await served_table(OffloadServiceStub(channel), layout, client_id)

    await retried(find, ATTACH_SECONDS)
    return RemoteTable(layout, address, device)
