"""Spans of this process, sent to an OpenTelemetry collector where an address of one is set.

A trace context travels as the text of W3C's `traceparent`: in HTTP headers, in gRPC metadata and,
where many requests share a call, in the messages. Without an address no OpenTelemetry code is
loaded and the context that came in passes on as it is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACEPARENT = "traceparent"
EXPORT_MILLISECONDS = 1000
EXPORT_TIMEOUT_SECONDS = 5
TRACES_HELP = "OTLP/HTTP address that spans are posted to, as http://host:4318/v1/traces"

traceparent_var: ContextVar[str] = ContextVar("traceparent", default="")

Kind = Literal["internal", "server", "client"]
Value = str | int | float | bool

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class OpenSpan(Protocol):
    """A span under way; `traceparent` is what its children are told."""

    @property
    def traceparent(self) -> str: ...

    def end(self, attributes: Mapping[str, Value] | None = None, *, error: str = "") -> None:
        """End it now, failed where `error` is not empty. Call it once."""
        ...


class Tracer(Protocol):
    """Makes the spans of one process. Thread-safe."""

    @property
    def active(self) -> bool:
        """Whether spans go anywhere."""
        ...

    def begin(self, name: str, parent: str = "", *, kind: Kind = "internal") -> OpenSpan:
        """A span that begins now. `parent` is a traceparent; empty: a trace of its own."""
        ...

    def record(
        self,
        name: str,
        parent: str,
        start: float,
        end: float,
        attributes: Mapping[str, Value] | None = None,
    ) -> None:
        """A span that is over; both times in seconds of `time.monotonic`."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class PassedOn:
    """The span of a process that makes none: its children belong to its parent."""

    def __init__(self, parent: str) -> None:
        self.traceparent = parent

    def end(self, attributes: Mapping[str, Value] | None = None, *, error: str = "") -> None:
        """Nothing to end."""


class NoTracer:
    """What a process has without an address."""

    active = False

    def begin(self, name: str, parent: str = "", *, kind: Kind = "internal") -> OpenSpan:
        """See `Tracer`."""
        return PassedOn(parent)

    def record(
        self,
        name: str,
        parent: str,
        start: float,
        end: float,
        attributes: Mapping[str, Value] | None = None,
    ) -> None:
        """See `Tracer`."""

    def close(self) -> None:
        """See `Tracer`."""


@contextmanager
def span(
    tracer: Tracer, name: str, parent: str | None = None, *, kind: Kind = "internal"
) -> Iterator[OpenSpan]:
    """A span around a block, whose calls to other services become its children.

    `parent` None means the span around this one. An exception ends the span as failed with the
    name of its type: messages of exceptions may hold what a client wrote.
    """
    opened = tracer.begin(name, traceparent_var.get() if parent is None else parent, kind=kind)
    token = traceparent_var.set(opened.traceparent)
    try:
        yield opened
    except BaseException as error:
        opened.end(error=type(error).__name__)
        raise
    else:
        opened.end()
    finally:
        traceparent_var.reset(token)


def checked_traceparent(text: str | None) -> str:
    """`text` if it is a trace context of version 00, else an empty text."""
    return text if text and _TRACEPARENT.fullmatch(text) else ""


def make_tracer(service: str, instance: str, endpoint: str) -> Tracer:
    """The tracer of a process; `endpoint` empty makes no spans."""
    if not endpoint:
        return NoTracer()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_SECONDS)
    return otel_tracer(service, instance, exporter)


def otel_tracer(service: str, instance: str, exporter: SpanExporter) -> Tracer:
    """Spans through the SDK, exported about once a second by a thread of its own."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    names = {"service.name": f"warhorse-{service}", "service.instance.id": instance}
    provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False)
    processor = BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_MILLISECONDS)
    provider.add_span_processor(processor)
    return _OtelTracer(provider)


class _OtelTracer:
    """`Tracer` over one provider of the SDK."""

    active = True

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("warhorse")
        self._propagator = TraceContextTextMapPropagator()
        self._kinds = {
            "internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT
        }  # fmt: skip

    def begin(self, name: str, parent: str = "", *, kind: Kind = "internal") -> OpenSpan:
        """See `Tracer`."""
        started = self._tracer.start_span(name, self._context(parent), kind=self._kinds[kind])
        return _OtelSpan(started)

    def record(
        self,
        name: str,
        parent: str,
        start: float,
        end: float,
        attributes: Mapping[str, Value] | None = None,
    ) -> None:
        """See `Tracer`."""
        offset = time.time_ns() - time.monotonic_ns()
        made = self._tracer.start_span(
            name,
            self._context(parent),
            attributes=attributes,
            start_time=offset + int(start * 1e9),
        )
        made.end(end_time=offset + int(end * 1e9))

    def close(self) -> None:
        """See `Tracer`."""
        self._provider.shutdown()

    def _context(self, parent: str) -> Any:
        from opentelemetry.context import Context

        return self._propagator.extract({TRACEPARENT: parent}, context=Context())


class _OtelSpan:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def traceparent(self) -> str:
        context = self._inner.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, attributes: Mapping[str, Value] | None = None, *, error: str = "") -> None:
        from opentelemetry.trace import StatusCode

        self._inner.set_attributes(attributes or {})
        if error:
            self._inner.set_status(StatusCode.ERROR, error)
        self._inner.end()
