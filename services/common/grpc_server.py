"""The gRPC server that every service runs: socket, limits, health, reflection, errors, drain."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.errors import StartupError
from services.common.grpc_client import MAX_MESSAGE_BYTES, socket_path
from services.common.grpc_interceptor import BorderInterceptor
from services.common.metrics import ProcessMetrics
from services.common.sockets import SocketLock
from services.common.tracing import Tracer

_log = logging.getLogger(__name__)

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)
# Clients behind a DNS name look it up again only when a connection ends; streams in flight on an
# aged connection run to their end, since no grace limit is set. A Unix socket has no name to
# look up, so its connections do not age.
_TCP_OPTIONS: tuple[tuple[str, Any], ...] = (("grpc.max_connection_age_ms", 120_000),)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# After cancelling what is left, handlers have this long to run their `finally` blocks, seconds.
_CANCEL_SECONDS = 1.0


class _RecordingServer(grpc.aio.Server):
    """Passes everything on to `inner` and remembers the services added, for reflection."""

    def __init__(self, inner: grpc.aio.Server) -> None:
        self._inner = inner
        self.service_names: list[str] = []

    def add_generic_rpc_handlers(
        self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler[Any, Any]]
    ) -> None:
        handlers = list(generic_rpc_handlers)
        for handler in handlers:
            if isinstance(handler, grpc.ServiceRpcHandler):
                self.service_names.append(handler.service_name())
        self._inner.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        self._inner.add_registered_method_handlers(  # type: ignore[attr-defined]
            service_name, method_handlers
        )

    def add_insecure_port(self, address: str) -> int:
        return self._inner.add_insecure_port(address)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        return self._inner.add_secure_port(address, server_credentials)

    async def start(self) -> None:
        await self._inner.start()

    async def stop(self, grace: float | None = None) -> None:
        await self._inner.stop(grace)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        return await self._inner.wait_for_termination(timeout)


class GrpcServer:
    """One service's server on `<run_dir>/<service>/<instance>.sock` and, if asked, on TCP.

    Construct it inside the running event loop, add servicers to `.server`, `await start()`, then
    `set_serving(name, True)` once ready. All methods belong to that loop.

    `listen` is `host:port` for a further TCP listener (empty: none); reflection answers there only
    with `reflection_on_tcp`. `open_ended` names the methods (`/warhorse.v1.EngineService/Load`)
    whose streams a drain does not wait for. `metrics` counts the calls, `tracer` makes a span of
    each. Raises StartupError when another process owns the
    socket or the port.
    """

    def __init__(
        self,
        service: str,
        instance: str,
        run_dir: Path,
        *,
        listen: str = "",
        grace_seconds: float = 10.0,
        reflection_on_tcp: bool = False,
        open_ended: Iterable[str] = (),
        max_receive_bytes: int = MAX_MESSAGE_BYTES,
        metrics: ProcessMetrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._name = instance or f"{service}-0"
        self._path = socket_path(run_dir, service, self._name)
        self._listen = listen
        self._grace_seconds = grace_seconds
        self._border = BorderInterceptor(
            reflection_on_tcp=reflection_on_tcp,
            open_ended=open_ended,
            metrics=metrics,
            tracer=tracer,
        )
        options = [
            *_OPTIONS,
            ("grpc.max_receive_message_length", max_receive_bytes),
            *(_TCP_OPTIONS if listen else ()),
        ]
        inner = grpc.aio.server(interceptors=[self._border], options=options)
        self._recorder = _RecordingServer(inner)
        self.server: grpc.aio.Server = self._recorder
        self.tcp_port = 0  # the bound port once started, 0 without a TCP listener
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._lock: SocketLock | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop_asked = asyncio.Event()

    @property
    def path(self) -> Path:
        """The Unix socket."""
        return self._path

    @property
    def draining(self) -> bool:
        """True from the first stop signal on; new calls are then refused with DRAINING."""
        return self._border.draining

    @property
    def in_flight(self) -> int:
        """Calls being handled, without open-ended streams, health and reflection."""
        return self._border.in_flight

    def set_serving(self, full_service_name: str, serving: bool) -> None:
        """Publish readiness of a service (full proto name) through grpc.health.v1."""
        state = health_pb2.HealthCheckResponse
        status = state.SERVING if serving else state.NOT_SERVING
        task = asyncio.get_running_loop().create_task(self._health.set(full_service_name, status))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def start(self) -> None:
        """Take the socket, bind and accept calls. Health of "" is SERVING from here on."""
        self._lock = SocketLock(self._path)
        try:
            self._enable_reflection()
            self.server.add_insecure_port(f"unix:{self._lock.path}")
            if self._listen:
                self.tcp_port = self._bind_tcp()
            await self.server.start()
        except BaseException:
            self._lock.release()
            raise
        _log.info("listening", extra={"socket": str(self._path), "tcp_port": self.tcp_port})

    def _bind_tcp(self) -> int:
        try:
            return self.server.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise StartupError(
                f"cannot listen on {self._listen}: the port is in use or the address is not ours"
            ) from error

    def _enable_reflection(self) -> None:
        names = [*self._recorder.service_names, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.server)

    async def run_until_signal(self, on_drain: Callable[[], Awaitable[None]] | None = None) -> None:
        """Serve until SIGTERM or SIGINT (or `ask_stop`), then drain and stop.

        Order: health NOT_SERVING, new calls refused, `on_drain` and the calls in flight get
        `grace_seconds` together, what is left is cancelled, the socket is removed. A second signal
        ends the grace at once; later ones are ignored until the event loop closes, so that what
        the caller cleans up afterwards is not interrupted. Call it in the main thread.
        """
        self._install_signals()
        try:
            await self._stop_asked.wait()
            self._stop_asked.clear()
            await self._drain(on_drain)
        finally:
            await self.stop()

    def ask_stop(self) -> None:
        """Do what a first (or second) stop signal does."""
        self._stop_asked.set()

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.ask_stop)

    async def _drain(self, on_drain: Callable[[], Awaitable[None]] | None) -> None:
        _log.info("draining", extra={"in_flight": self.in_flight})
        await self._health.enter_graceful_shutdown()
        self._border.draining = True
        work = asyncio.ensure_future(self._finish_calls(on_drain))
        hurry = asyncio.ensure_future(self._stop_asked.wait())
        await asyncio.wait({work, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        work.cancel()
        (outcome,) = await asyncio.gather(work, return_exceptions=True)
        if isinstance(outcome, Exception):
            _log.error("error while draining", exc_info=outcome)

    async def _finish_calls(self, on_drain: Callable[[], Awaitable[None]] | None) -> None:
        try:
            async with asyncio.timeout(self._grace_seconds):
                if on_drain is not None:
                    await on_drain()
                await self._border.wait_idle(self._grace_seconds)
        except TimeoutError:
            _log.warning("grace period over", extra={"in_flight": self.in_flight})

    async def stop(self) -> None:
        """Cancel what is in flight, close the listeners and give the socket back. Idempotent."""
        await self.server.stop(None)
        await self._border.wait_idle(_CANCEL_SECONDS)
        if self._lock is not None:
            self._lock.release()
