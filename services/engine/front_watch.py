"""What the front tells about its requests and its core: spans, log lines, metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from warhorse.v1.engine_pb2 import GenerateRequest, LoadResponse
from warhorse.v1.stage_pb2 import CoreStats

from services.common.metrics import Reading, Samples, single
from services.common.ring_memory import RingStats
from services.common.tracing import NoTracer, OpenSpan, Tracer, checked_traceparent

logger = logging.getLogger(__name__)

Row = tuple[str, Literal["gauge", "counter"], str]  # name, kind, what it says
Rings = Callable[[], Mapping[str, RingStats]]

_LOAD: tuple[Row, ...] = (
    ("running", "gauge", "Running requests"),
    ("waiting", "gauge", "Waiting requests"),
    ("waiting_tokens", "gauge", "Tokens of waiting requests"),
    ("preemptions", "counter", "Preempted requests"),
    ("prompt_tokens", "counter", "Prompt tokens computed or found"),
    ("generation_tokens", "counter", "Tokens generated"),
    ("prefix_queries_tokens", "counter", "Tokens looked up in the pools"),
    ("prefix_hit_tokens", "counter", "Tokens found in the pools"),
    ("external_query_tokens", "counter", "Tokens looked up in the store"),
    ("external_hit_tokens", "counter", "Tokens found in the store"),
    ("drafts", "counter", "Steps of sequences with drafts"),
    ("draft_tokens", "counter", "Draft tokens"),
    ("accepted_draft_tokens", "counter", "Draft tokens accepted"),
)
_STATS: tuple[Row, ...] = (
    ("steps", "counter", "Steps"),
    ("step_seconds", "counter", "Time of steps"),
    ("gathered_rows", "counter", "Rows of n-gram tables gathered"),
    ("gather_seconds", "counter", "Time until gathered rows were there"),
    ("store_jobs", "gauge", "Jobs of the store without an answer"),
    ("kvcache_connected", "gauge", "Whether there is a session with the store"),
    ("open_regions", "gauge", "Mapped regions of the core process"),
    ("region_bytes", "gauge", "Bytes of mapped regions of the core process"),
    ("resident_bytes", "gauge", "Resident memory of the core process"),
)
_RINGS: tuple[Row, ...] = (
    ("sent", "counter", "Messages sent"),
    ("sent_bytes", "counter", "Bytes sent"),
    ("received", "counter", "Messages received"),
    ("hop_seconds_total", "counter", "Time from sending to receiving"),
    ("hop_seconds_max", "gauge", "Longest hop since the start of the core"),
    ("full_waits", "counter", "Times a sender waited for room"),
)


@dataclass(slots=True)
class _Live:
    client_id: str
    span: OpenSpan


class FrontWatch:
    """Follows the requests of a front and keeps what its core last reported. Event loop only.

    The metrics read it from another thread; what they read is replaced as a whole.
    """

    def __init__(self, tracer: Tracer | None = None, rings: Rings = dict) -> None:
        self._tracer = tracer or NoTracer()
        self._rings = rings
        self._ring_stats: Mapping[str, RingStats] = {}
        self._stats = CoreStats()
        self._load = LoadResponse()
        self._live: dict[int, _Live] = {}

    def begin(self, handle: int, request: GenerateRequest) -> None:
        """A request goes to the core, whose spans become children of the one made here."""
        span = self._tracer.begin("engine", checked_traceparent(request.traceparent))
        request.traceparent = span.traceparent
        self._live[handle] = _Live(request.client_request_id or request.request_id, span)

    def end(self, handle: int, prompt_tokens: int, error: str) -> None:
        """A request is over; `error` is the name of what ended it, or empty."""
        live = self._live.pop(handle, None)
        if live is not None:
            live.span.end({"prompt_tokens": prompt_tokens}, error=error)
            extra = {"request_id": live.client_id, "prompt_tokens": prompt_tokens, "error": error}
            logger.info("request ended", extra=extra)

    def on_load(self, load: LoadResponse) -> None:
        """The core's load record."""
        self._load = load

    def on_stats(self, stats: CoreStats) -> None:
        """The core's report."""
        self._stats = stats
        self._ring_stats = dict(self._rings())

    def on_lost(self) -> None:
        """The core is gone."""
        self._load, self._stats, self._ring_stats = LoadResponse(), CoreStats(), {}

    def readings(self) -> tuple[Reading, ...]:
        """What the metrics of the process show; names of the core process start with `core_`."""
        own = Reading(
            "warhorse:requests_open",
            "Requests whose call has not ended",
            "gauge",
            single(lambda: len(self._live)),
        )
        pages = Reading(
            "warhorse:cache_pages",
            "Pages or slots of a cache pool",
            "gauge",
            self._pages,
            ("group", "state"),
        )
        load = (Reading(f"warhorse:{n}", t, k, self._of_load(n)) for n, k, t in _LOAD)
        stats = (Reading(f"warhorse:core_{n}", t, k, self._of_stats(n)) for n, k, t in _STATS)
        rings = (
            Reading(f"warhorse:ring_{n}", t, k, self._of_rings(n), ("ring",)) for n, k, t in _RINGS
        )
        return (own, pages, *load, *stats, *rings)

    def _of_load(self, field: str) -> Callable[[], Samples]:
        return single(lambda: getattr(self._load, field))

    def _of_stats(self, field: str) -> Callable[[], Samples]:
        return single(lambda: getattr(self._stats, field))

    def _of_rings(self, field: str) -> Callable[[], Samples]:
        return lambda: [
            ((ring,), float(getattr(stats, field))) for ring, stats in self._ring_stats.items()
        ]

    def _pages(self) -> Samples:
        for group in self._stats.cache_groups:
            used = group.total_pages - group.free_pages - group.cached_pages
            states = (("used", used), ("cached", group.cached_pages), ("free", group.free_pages))
            for state, pages in states:
                yield (group.name, state), float(pages)
