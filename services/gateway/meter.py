"""What one request measures about itself and reports to the metrics once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from services.gateway.events import Ended, EngineTimes, Event, Update, Usage
from services.gateway.metrics import REJECTIONS, Metrics


class RequestMeter:
    """Times and counts of one request. `close` reports; later calls do nothing."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.perf_counter()
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._observe_gap: Callable[[float], None] = _ignore
        self._finish_reasons: list[str] = []
        self._usage: Usage | None = None
        self._times: Sequence[EngineTimes] = ()
        self._failed = False
        self._closed = False
        self.model = ""
        self.choices = 1
        self.max_tokens: int | None = None
        self.tools = False  # outputs were parsed for tool calls

    def on_events(self, events: Sequence[Event]) -> None:
        """Take the time of tokens as they go out."""
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Update):
                self._on_update(event.choice, now)
            elif isinstance(event, Ended):
                self._finish_reasons.append(event.finish_reason)

    def _on_update(self, choice: int, now: float) -> None:
        last = self._last.get(choice)
        self._last[choice] = now
        if last is not None:
            self._observe_gap(now - last)
        elif self._first is None:
            self._first = now
            self._metrics.first_token(self.model, now - self._began)
            self._observe_gap = self._metrics.inter_token_observer(self.model)

    def on_images(self, images: int, kept: int) -> None:
        """A prompt holds so many images, `kept` of which were not decoded anew."""
        if images:
            self._metrics.images(self.model, images, kept)

    def on_complete(self, usage: Usage, times: Sequence[EngineTimes] = ()) -> None:
        """All choices ended; `times` of each prompt."""
        self._usage = usage
        self._times = times

    def on_error(self, status: int) -> None:
        """The request failed with an error for the client, of this HTTP status."""
        self._failed = True
        if status in REJECTIONS and self._first is None and self.model:
            self._metrics.rejected(self.model, REJECTIONS[status])

    def close(self) -> None:
        """Report; a request that neither completed nor failed was aborted by its client."""
        if self._closed or not self.model:
            return
        self._closed = True
        if self._usage is None:
            self._metrics.finished(self.model, "error" if self._failed else "abort")
            return
        for reason in self._finish_reasons:
            self._metrics.finished(self.model, "stop" if reason == "tool_calls" else reason)
        self._metrics.request(
            self.model,
            self._usage,
            seconds=time.perf_counter() - self._began,
            choices=self.choices,
            max_tokens=self.max_tokens,
        )
        for times in self._times:
            self._metrics.engine_times(self.model, times)
        if self.tools:
            self._metrics.parsed_tools(self.model, len(self._finish_reasons))
        if self._first is not None:
            span = max([*self._last.values(), self._first]) - self._first
            self._metrics.per_token(self.model, span, self._usage.completion)


def _ignore(_: float) -> None:
    """Observes nothing: there is no gap before the first token."""
