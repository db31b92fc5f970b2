"""The generations that run now, so that they can be found by the id that the client knows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from services.gateway.identity import public_request_id
from services.gateway.plan import GenerationPlan

_RESPONSE_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|resp_|msg_)")


class LiveRequests:
    """Engine ids of live generations by public id. Lives in one event loop."""

    def __init__(self) -> None:
        self._engine_ids: dict[str, list[str]] = {}

    @contextmanager
    def running(self, plans: Sequence[GenerationPlan]) -> Iterator[None]:
        """Keep the ids of `plans` while the block runs."""
        ids = [plan.request.request_id for plan in plans]
        for engine_id in ids:
            self._engine_ids.setdefault(public_request_id(engine_id), []).append(engine_id)
        try:
            yield
        finally:
            for engine_id in ids:
                self._drop(engine_id)

    def find(self, ids: Iterable[str]) -> list[str]:
        """Engine ids of the live generations of these requests or responses."""
        plain = {_RESPONSE_PREFIX.sub("", i)[:240] for i in ids} | {i[:240] for i in ids}
        return [e for public in sorted(plain) for e in self._engine_ids.get(public, ())]

    def _drop(self, engine_id: str) -> None:
        public = public_request_id(engine_id)
        self._engine_ids[public].remove(engine_id)
        if not self._engine_ids[public]:
            del self._engine_ids[public]
