"""The engine's latest load record and those who watch it."""

from __future__ import annotations

import asyncio
import contextlib

from warhorse.v1.engine_pb2 import LoadResponse

HEARTBEAT_SECONDS = 0.9
PACE_SECONDS = 0.05  # changes within this time reach a watcher as one record


class LoadBoard:
    """Holds the latest record. Event loop only; any number of watchers."""

    def __init__(self) -> None:
        self._record = LoadResponse()
        self._content = LoadResponse()  # the record without its age
        self._changed = asyncio.Event()

    def publish(self, record: LoadResponse, *, draining: bool) -> None:
        """Replace the record; watchers wake when more than its age differs."""
        content = LoadResponse()
        content.CopyFrom(record)
        content.draining = draining
        content.silence_ms = 0
        content.sequence = self._record.sequence
        changed = content != self._content
        fresh = LoadResponse()
        fresh.CopyFrom(content)
        fresh.silence_ms = record.silence_ms
        if changed:
            content.sequence = fresh.sequence = self._record.sequence + 1
            self._content = content
        self._record = fresh
        if changed:
            self._changed.set()
            self._changed = asyncio.Event()

    def latest(self) -> LoadResponse:
        """The present record; do not change it."""
        return self._record

    async def wait_for_change(self) -> LoadResponse:
        """The next changed record, or the present one when nothing changes for a while."""
        changed = self._changed
        await asyncio.sleep(PACE_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), HEARTBEAT_SECONDS - PACE_SECONDS)
        return self._record
