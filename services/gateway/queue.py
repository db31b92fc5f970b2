"""How many requests may wait for their first token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.gateway.errors import BUSY, ApiError


class Place:
    """The place of one request in a queue; given up once."""

    def __init__(self, queue: Queue) -> None:
        self._queue: Queue | None = queue

    def leave(self) -> None:
        """The request waits no longer."""
        if self._queue is not None:
            self._queue.waiting -= 1
            self._queue = None


class Queue:
    """Counts waiting requests against a limit. Lives in one event loop."""

    def __init__(self, limit: int) -> None:
        """`limit`: 0 means none."""
        self._limit = limit
        self.waiting = 0

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A place, held until `leave` or the end of the block. Raises ApiError 503 when full."""
        if self._limit and self.waiting >= self._limit:
            message = f"{self.waiting} requests wait already, at most {self._limit} may."
            raise ApiError(503, BUSY, message, retry_after=1.0)
        self.waiting += 1
        place = Place(self)
        try:
            yield place
        finally:
            place.leave()
