"""The border of every service: request ids and traces in, errors out, counts, drain, reflection.

One interceptor wraps all four kinds of handlers. A `ServiceError` becomes its rich status; an
error of a call to another service passes on with its own reason; any other exception is our bug:
logged with its traceback and answered with INTERNAL and no detail. Cancellation and deadlines are
`CancelledError` in asyncio and are never caught here.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_status import rpc_status

from services.common.errors import ErrorReason, ServiceError, from_rpc_error
from services.common.grpc_client import REQUEST_ID_KEY
from services.common.logs import request_id_var
from services.common.metrics import ProcessMetrics
from services.common.tracing import (
    TRACEPARENT,
    NoTracer,
    Tracer,
    checked_traceparent,
    span,
    traceparent_var,
)

_log = logging.getLogger(__name__)

_HEALTH = "/grpc.health."
_REFLECTION = "/grpc.reflection."
_REQUEST_ID_LIMIT = 128
# A refused stream's first message is taken for this long, seconds: see `_first_of`.
_FIRST_MESSAGE_SECONDS = 1.0

# The library's classes take type parameters in their stubs only.
if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor


class BorderInterceptor(_Interceptor):
    """Owned by one server; used from its event loop only.

    `open_ended` are full method names (`/pkg.Service/Method`) of streams that last as long as
    their client; a drain does not wait for them.
    """

    def __init__(
        self,
        *,
        reflection_on_tcp: bool,
        open_ended: Iterable[str] = (),
        metrics: ProcessMetrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.draining = False
        self._metrics = metrics
        self._tracer = tracer or NoTracer()
        self._reflection_on_tcp = reflection_on_tcp
        self._open_ended = frozenset(open_ended)
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Calls being handled that a drain waits for."""
        return self._in_flight

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until no call is in flight; False if that took longer than `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: the library answers UNIMPLEMENTED
            return handler
        method = _text(handler_call_details.method)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(method, handler.unary_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(
                self._unary(method, handler.stream_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        assert handler.stream_stream is not None
        return grpc.stream_stream_rpc_method_handler(
            self._stream(method, handler.stream_stream),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _unary(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def handle(request: Any, context: Any) -> Any:
            async with self._border(method, request, context):
                return await behaviour(request, context)

        return handle

    def _stream(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        """A handler that closes the service's generator at once when the call is cancelled."""

        async def handle(request: Any, context: Any) -> None:
            async with self._border(method, request, context):
                responses = behaviour(request, context)
                if inspect.isawaitable(responses):  # the handler calls context.write itself
                    await responses
                    return
                async with aclosing(responses):
                    async for response in responses:
                        await context.write(response)

        return handle

    @asynccontextmanager
    async def _border(self, method: str, request: Any, context: Any) -> AsyncIterator[None]:
        request_id_var.set(_metadata(context, REQUEST_ID_KEY)[:_REQUEST_ID_LIMIT])
        traceparent_var.set(checked_traceparent(_metadata(context, TRACEPARENT)))
        tracked = not (method in self._open_ended or method.startswith((_HEALTH, _REFLECTION)))
        began, code = time.perf_counter(), "OK"
        try:
            if tracked:
                self._enter()
            with self._span(method, tracked):
                await self._admit(method, request, context)
                yield
        except ServiceError as error:
            code = error.code.name
            await _refuse(context, method, error)
        except grpc.aio.AbortError:
            code = "ABORTED"
            raise
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except grpc.RpcError as error:
            refused = from_rpc_error(error)
            code = refused.code.name
            await _refuse(context, method, refused)
        except Exception:
            code = "INTERNAL"
            _log.exception("unexpected error in %s", method)
            failure = ServiceError(ErrorReason.ERROR_REASON_INTERNAL, "internal error")
            await _refuse(context, method, failure)
        finally:
            self._count(method, code, time.perf_counter() - began if tracked else None)
            if tracked:
                self._leave()

    def _span(self, method: str, tracked: bool) -> AbstractContextManager[object]:
        """A span around calls of requests; those that last as long as their client have none."""
        if not tracked or not self._tracer.active:
            return nullcontext()
        return span(self._tracer, _short(method), kind="server")

    def _count(self, method: str, code: str, seconds: float | None) -> None:
        if self._metrics is not None and not method.startswith((_HEALTH, _REFLECTION)):
            self._metrics.rpc(_short(method), code, seconds)

    async def _admit(self, method: str, request: Any, context: Any) -> None:
        refusal = self._refusal(method, context)
        if refusal is not None:
            await _first_of(request)
            raise refusal

    def _refusal(self, method: str, context: Any) -> ServiceError | None:
        """Why a call may not begin, or None."""
        if method.startswith(_HEALTH):
            return None
        if method.startswith(_REFLECTION):
            if self._reflection_on_tcp or _text(context.peer()).startswith("unix"):
                return None
            reason = ErrorReason.ERROR_REASON_UNSUPPORTED
            return ServiceError(reason, "reflection is off on this address")
        if self.draining:
            reason = ErrorReason.ERROR_REASON_DRAINING
            return ServiceError(reason, "the service is shutting down", retry_after=1.0)
        return None

    def _enter(self) -> None:
        self._in_flight += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _short(method: str) -> str:
    """`/warhorse.v1.EngineService/Load` -> `EngineService/Load`."""
    return method.removeprefix("/").removeprefix("warhorse.v1.")


def _metadata(context: Any, wanted: str) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == wanted:
            return _text(value)
    return ""


async def _first_of(request: Any) -> None:
    """Take the first message of a stream that is about to be refused.

    A client whose write meets a call that has ended loses the call's status: the library puts
    INTERNAL in its place (https://github.com/grpc/grpc/issues/36066).
    """
    if not isinstance(request, AsyncIterator):
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_MESSAGE_SECONDS):
            await anext(request, None)


async def _refuse(context: Any, method: str, error: ServiceError) -> None:
    """End the call with the error's status; always raises the library's AbortError."""
    _log.debug("%s refused: %s (%s)", method, error.reason_name, error.message)
    await context.abort_with_status(rpc_status.to_status(error.to_status()))
