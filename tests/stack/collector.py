"""A stand-in for an OpenTelemetry collector: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace: str
    id: str
    parent: str
    seconds: float


@dataclass
class Collector:
    port: int = 0
    spans: list[Span] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    def trace(self, trace_id: str) -> list[Span]:
        return [s for s in tuple(self.spans) if s.trace == trace_id]

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            facts = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [_span(facts["service.name"], raw) for raw in scope.spans]


def _span(service: str, raw: Any) -> Span:
    return Span(
        service=service,
        name=raw.name,
        trace=raw.trace_id.hex(),
        id=raw.span_id.hex(),
        parent=raw.parent_span_id.hex(),
        seconds=(raw.end_time_unix_nano - raw.start_time_unix_nano) / 1e9,
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            packed = self.headers.get("content-encoding") == "gzip"
            collector.take(gzip.decompress(body) if packed else body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nothing on standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.port = server.server_port
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
