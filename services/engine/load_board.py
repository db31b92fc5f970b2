"""The engine's latest load record and those who watch it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator

from warhorse.v1.engine_pb2 import LoadResponse

from services.common.prefix_chain import short_hashes

HEARTBEAT_SECONDS = 0.9
PACE_SECONDS = 0.05  # changes within this time reach a watcher as one record


class LoadBoard:
    """Holds the latest record and the cached prefixes. Event loop only; any number of watchers."""

    def __init__(self) -> None:
        self._record = LoadResponse()
        self._content = LoadResponse()  # the record without its age
        self._changed = asyncio.Event()
        self._prefixes: set[bytes] = set()
        self._watchers: list[LoadWatcher] = []

    def publish(self, record: LoadResponse, *, draining: bool) -> None:
        """Replace the record; watchers wake when more than its age differs."""
        moved = self._take_prefixes(record)
        content = LoadResponse()
        content.CopyFrom(record)
        content.ClearField("prefixes_gone")
        content.ClearField("prefixes_added")
        content.draining = draining
        content.silence_ms = 0
        content.sequence = self._record.sequence
        changed = moved or content != self._content
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

    def forget_prefixes(self) -> None:
        """The cache is gone, with its core."""
        self._prefixes.clear()
        for watcher in self._watchers:
            watcher.start_again()

    def latest(self) -> LoadResponse:
        """The present record without prefixes; do not change it."""
        return self._record

    @contextlib.contextmanager
    def watch(self) -> Iterator[LoadWatcher]:
        """A watcher; its first record has every cached prefix, later ones what changed."""
        watcher = LoadWatcher(self)
        self._watchers.append(watcher)
        try:
            yield watcher
        finally:
            self._watchers.remove(watcher)

    async def wait_for_change(self) -> None:
        """Return when the record changed, or when nothing has for a while."""
        changed = self._changed
        await asyncio.sleep(PACE_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), HEARTBEAT_SECONDS - PACE_SECONDS)

    @property
    def prefixes(self) -> frozenset[bytes]:
        """Short hashes of the units with which a hit may end."""
        return frozenset(self._prefixes)

    def _take_prefixes(self, record: LoadResponse) -> bool:
        gone = set(short_hashes(record.prefixes_gone)) & self._prefixes
        added = set(short_hashes(record.prefixes_added)) - self._prefixes
        self._prefixes -= gone
        self._prefixes |= added
        for watcher in self._watchers:
            watcher.note(gone, added)
        return bool(gone or added)


class LoadWatcher:
    """One who follows the board; knows which news it has not heard yet."""

    def __init__(self, board: LoadBoard) -> None:
        self._board = board
        self._news: dict[bytes, bool] = {}
        self._fresh = True

    def start_again(self) -> None:
        """Its next record has everything, from nothing."""
        self._fresh = True
        self._news.clear()

    def note(self, gone: Iterable[bytes], added: Iterable[bytes]) -> None:
        """Keep news until the next record; the last word on a prefix counts."""
        if not self._fresh:
            self._news.update(dict.fromkeys(gone, False))
            self._news.update(dict.fromkeys(added, True))

    async def next(self) -> LoadResponse:
        """The record of the moment; waits for a change, but not before the first one."""
        if not self._fresh:
            await self._board.wait_for_change()
        record = LoadResponse()
        record.CopyFrom(self._board.latest())
        if self._fresh:
            record.prefixes_reset = True
            record.prefixes_added = b"".join(self._board.prefixes)
        else:
            record.prefixes_gone = b"".join(h for h, came in self._news.items() if not came)
            record.prefixes_added = b"".join(h for h, came in self._news.items() if came)
        self._fresh = False
        self._news.clear()
        return record
