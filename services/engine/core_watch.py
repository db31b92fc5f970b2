"""What the core process tells about itself: spans and log lines of requests, table gathers."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from warhorse.v1.stage_pb2 import CoreSubmit

from services.common.tracing import NoTracer, Tracer, Value, checked_traceparent
from services.engine.runtime.batch import PendingRows
from services.engine.scheduler.messages import EngineEvent, FinishedOut, PromptDone

logger = logging.getLogger(__name__)

MAX_STEP_GATHERS = 64


@dataclass(frozen=True, slots=True)
class Label:
    """A request to the outside: its id in log lines, and the trace context of its spans."""

    client_id: str
    traceparent: str


UNKNOWN = Label("", "")


@dataclass(frozen=True, slots=True)
class Gather:
    """Rows of one table for one step; times in seconds of `time.monotonic`."""

    table: str
    rows: int
    start: float
    end: float


class GatherWatch:
    """Counts the rows that are gathered and the time until they were there. The core's thread."""

    def __init__(self) -> None:
        self.rows = 0
        self.seconds = 0.0
        self._step: list[Gather] = []

    def watched(self, table: str, rows: int, pending: PendingRows) -> PendingRows:
        """`pending`, counted once it is waited for."""
        return _WatchedRows(self, table, rows, pending)

    def take(self) -> list[Gather]:
        """The gathers that ended since the last call."""
        found, self._step = self._step, []
        return found

    def note(self, gather: Gather) -> None:
        """A gather ended."""
        self.rows += gather.rows
        self.seconds += gather.end - gather.start
        if len(self._step) < MAX_STEP_GATHERS:
            self._step.append(gather)


class _WatchedRows:
    def __init__(self, watch: GatherWatch, table: str, rows: int, inner: PendingRows) -> None:
        self._watch = watch
        self._table = table
        self._rows = rows
        self._inner = inner
        self._start = time.monotonic()
        self._noted = False

    def wait(self) -> torch.Tensor:
        """See `PendingRows`."""
        rows = self._inner.wait()
        if not self._noted:
            self._noted = True
            gather = Gather(self._table, self._rows, self._start, time.monotonic())
            self._watch.note(gather)
        return rows


class CoreWatch:
    """Follows the requests of a core. Written by the core's thread, `label` read from any."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.tracer: Tracer = tracer or NoTracer()
        self.gathers = GatherWatch()
        self._labels: dict[str, Label] = {}
        self._prompt_done: dict[str, float] = {}

    def label(self, request_id: str) -> Label:
        """Of a live request of the core."""
        return self._labels.get(request_id, UNKNOWN)

    def begin(self, submit: CoreSubmit) -> None:
        """A request came in; `end` follows."""
        request = submit.request
        client_id = request.client_request_id or request.request_id
        trace = checked_traceparent(request.traceparent)
        self._labels[submit.request_id] = Label(client_id, trace)

    def end(self, request_id: str) -> None:
        """A request is over."""
        label = self._labels.pop(request_id, UNKNOWN)
        began = self._prompt_done.pop(request_id, None)
        if began is not None:
            self.tracer.record("decode", label.traceparent, began, time.monotonic())

    def on_event(self, event: EngineEvent, gathers: list[Gather]) -> None:
        """An event of a step in which `gathers` were made."""
        match event:
            case PromptDone():
                self._on_prompt(event, gathers)
            case FinishedOut():
                extra = {
                    "request_id": self.label(event.request_id).client_id,
                    "choice": event.choice,
                    "tokens": event.completion_tokens,
                }
                logger.debug("choice ended", extra=extra)
            case _:
                pass

    def _on_prompt(self, event: PromptDone, gathers: list[Gather]) -> None:
        now = time.monotonic()
        self._prompt_done[event.request_id] = now
        parent = self.label(event.request_id).traceparent
        started = now - event.prefill_seconds
        counts = {"cached_tokens": event.cached, "external_cached_tokens": event.external_cached}
        self.tracer.record("queue", parent, started - event.queue_seconds, started)
        self.tracer.record("prefill", parent, started, now, counts)
        for gather in gathers:
            about: dict[str, Value] = {"table": gather.table, "rows": gather.rows}
            self.tracer.record("table gather", parent, gather.start, gather.end, about)
