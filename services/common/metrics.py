"""The Prometheus metrics of one process, and the port on which they are read.

Every label takes its values from a closed set that the process itself knows (its methods, cache
groups, status codes): no client can add a series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.errors import StartupError
from services.common.shm import region_counts

PORT_HELP = "port of /metrics of this process; 0: none"
HOST_HELP = "address that the port of /metrics is opened on"

# Seconds; a call between two processes of a host takes about 300 us.
RPC_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)

Samples = Iterable[tuple[Sequence[str], float]]


@dataclass(frozen=True, slots=True)
class Reading:
    """One metric that is read when somebody asks, from whatever thread.

    `read` gives label values and number of each series. Counters are shown with `_total`.
    """

    name: str
    text: str
    kind: Literal["gauge", "counter"]
    read: Callable[[], Samples]
    labels: tuple[str, ...] = ()


def single(read: Callable[[], float]) -> Callable[[], Samples]:
    """The `read` of a metric without labels."""
    return lambda: [((), float(read()))]


class _Readings(Collector):
    def __init__(self, readings: Sequence[Reading]) -> None:
        self._readings = readings

    def describe(self) -> Iterable[Metric]:
        """Names are found by collecting."""
        return ()

    def collect(self) -> Iterator[Metric]:
        for reading in self._readings:
            make = CounterMetricFamily if reading.kind == "counter" else GaugeMetricFamily
            family = make(reading.name, reading.text, labels=reading.labels)
            for labels, value in reading.read():
                family.add_metric(labels, value)
            yield family


class ProcessMetrics:
    """Owns the registry of one process. `rpc` belongs to the event loop of its gRPC server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._calls = Counter(
            "warhorse:rpcs", "Calls that ended", ("method", "code"), registry=self.registry
        )
        self._seconds = Histogram(
            "warhorse:rpc_seconds",
            "Time of calls, without those that last as long as their client",
            ("method",),
            buckets=RPC_SECONDS,
            registry=self.registry,
        )
        self.add(
            Reading("warhorse:open_regions", "Mapped regions", "gauge",
                    single(lambda: region_counts()[0])),
            Reading("warhorse:region_bytes", "Bytes of mapped regions", "gauge",
                    single(lambda: region_counts()[1])),
        )  # fmt: skip

    def add(self, *readings: Reading) -> None:
        """Show `readings` from now on. Each name may be added once."""
        self.registry.register(_Readings(readings))

    def rpc(self, method: str, code: str, seconds: float | None) -> None:
        """A call of a method of ours ended. `seconds` None: it lasted as long as its client."""
        self._calls.labels(method, code).inc()
        if seconds is not None:
            self._seconds.labels(method).observe(seconds)

    @contextmanager
    def served(self, host: str, port: int) -> Iterator[int]:
        """Answer on `http://host:port/metrics` while the block runs; yields the port, 0 for none.

        A thread answers, so that a busy event loop is seen as busy, not as absent. Raises
        StartupError where the port is taken.
        """
        if port == 0:
            yield 0
            return
        try:
            server, thread = start_http_server(port, host, registry=self.registry)
        except OSError as error:
            raise StartupError(f"--metrics-port {port} on {host}: {error.strerror}") from error
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
