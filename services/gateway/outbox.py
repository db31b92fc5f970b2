"""The bounded queue between the choices of a request and the one writer of its response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.gateway.events import Event, Restarted, Update

MAX_EVENTS = 256
MAX_TOKENS = 4096


class Outbox:
    """Events of all choices of one request, in order of arrival.

    Producers call `put` while it is not `full`; one consumer calls `take`, which calls `on_room`
    when it makes room. When the producers are done, `close` or `fail` ends the stream. All in
    one event loop.
    """

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._on_room = on_room
        self._events: list[Event] = []
        self._tokens = 0
        self._closed = False
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.full = False  # producers shall not add more; a few events above the bound are fine

    def put(self, event: Event) -> None:
        """Add one event; never blocks."""
        self._events.append(event)
        if isinstance(event, Update):
            self._tokens += len(event.token_ids)
        if len(self._events) >= MAX_EVENTS or self._tokens >= MAX_TOKENS:
            self.full = True
        self._wake()

    def close(self) -> None:
        """End of the stream."""
        self._closed = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End of the stream by an error, raised after the events before it were taken."""
        if self._error is None:
            self._error = error
        self.close()

    def poke(self) -> None:
        """Let a waiting `take` return an empty list."""
        self._wake()

    def restart(self, choices: range) -> None:
        """Drop what is queued for `choices` and tell the consumer to forget the rest."""
        self._events = [
            e for e in self._events if isinstance(e, Restarted) or e.choice not in choices
        ]
        self.put(Restarted(choices))

    async def take(self) -> list[Event] | None:
        """All events so far; an empty list after `poke`; None at the end of the stream.

        Raises the error of `fail`.
        """
        if not self._events and not self._closed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._events and self._closed:
            if self._error is not None:
                raise self._error
            return None
        events, self._events = self._events, []
        self._tokens = 0
        if self.full:
            self.full = False
            self._on_room()
        return events

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
