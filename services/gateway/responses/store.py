"""Responses that a client may ask for again or continue, kept in this process for a while."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to and including it as chat messages."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]


class ResponseStore:
    """Keeps the responses used last, within `max_bytes` of JSON and for `seconds`."""

    def __init__(
        self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, int, StoredResponse]] = OrderedDict()
        self.nbytes = 0

    def put(self, response: StoredResponse) -> None:
        """Keep a response under its id; one that is larger than the whole store is not kept."""
        response_id = response.body["id"]
        self.drop(response_id)
        size = len(orjson.dumps([response.body, response.messages]))
        if size > self._max_bytes:
            return
        self._kept[response_id] = (self._clock() + self._seconds, size, response)
        self.nbytes += size
        while self.nbytes > self._max_bytes:
            self.drop(next(iter(self._kept)))

    def get(self, response_id: str) -> StoredResponse | None:
        """The response, or None where it was never stored, was dropped or has expired."""
        self._expire()
        entry = self._kept.get(response_id)
        if entry is None:
            return None
        self._kept.move_to_end(response_id)
        return entry[2]

    def drop(self, response_id: str) -> bool:
        """Forget a response; whether it was there."""
        entry = self._kept.pop(response_id, None)
        if entry is not None:
            self.nbytes -= entry[1]
        return entry is not None

    def _expire(self) -> None:
        now = self._clock()
        for response_id in [i for i, (end, _, _) in self._kept.items() if end <= now]:
            self.drop(response_id)
