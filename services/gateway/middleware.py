"""ASGI layers around the application: request ids, access log and metrics, API keys."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.logs import request_id_var
from services.common.tracing import (
    TRACEPARENT,
    NoTracer,
    Tracer,
    checked_traceparent,
    traceparent_var,
)
from services.gateway.errors import ApiError
from services.gateway.identity import request_id
from services.gateway.messages.errors import error_response
from services.gateway.metrics import Metrics

access_logger = logging.getLogger("services.gateway.access")

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version", "/metrics"})
_MODEL_PATH = re.compile(r"/v1/models/.+")
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class RequestIds:
    """Gives every request an id (`scope["request_id"]`) and counts, times and logs it."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        handlers: Iterable[str],
        *,
        echo: bool,
        access_log: bool,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer or NoTracer()
        self._app = app
        self._metrics = metrics
        self._handlers = frozenset(handlers)
        self._echo = echo
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; other scopes pass untouched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id")
        scope["client_request_id"] = given
        scope["request_id"] = request_id(given, None)
        token = request_id_var.set(scope["request_id"])
        began = time.perf_counter()
        parent = checked_traceparent(Headers(scope=scope).get(TRACEPARENT))
        opened = self._tracer.begin(self._name(scope), parent, kind="server")
        trace = traceparent_var.set(opened.traceparent)
        try:
            await self._app(scope, receive, self._noting(scope, send))
        finally:
            status = scope.get("status", 500)
            about = {"http.response.status_code": status, "request_id": request_id_var.get()}
            opened.end(about, error=str(status) if status >= 500 else "")
            self._record(scope, time.perf_counter() - began)
            traceparent_var.reset(trace)
            request_id_var.reset(token)

    def _name(self, scope: Scope) -> str:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        return f"{method} {self._handler(scope['path'])}"

    def _noting(self, scope: Scope, send: Send) -> Send:
        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["status"] = message["status"]
                if self._echo:
                    MutableHeaders(scope=message)["X-Request-Id"] = scope["request_id"]
            await send(message)

        return noting

    def _record(self, scope: Scope, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        status = scope.get("status", 500)
        self._metrics.http(method, self._handler(scope["path"]), status, seconds)
        if self._access_log:
            access_logger.info(
                "%s %s %d",
                method,
                self._handler(scope["path"]),
                status,
                extra={"method": method, "status": status, "seconds": round(seconds, 4)},
            )

    def _handler(self, path: str) -> str:
        """A label from a closed set: clients must not be able to add series."""
        if path in self._handlers:
            return path
        return "/v1/models/{id}" if _MODEL_PATH.fullmatch(path) else "other"


class ApiKeys:
    """Refuses requests without one of the keys. Compares digests in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if self._may_pass(scope):
            await self._app(scope, receive, send)
        else:
            message = "The API key is missing or wrong."
            headers = {"WWW-Authenticate": "Bearer"}
            error = ApiError(401, "authentication_error", message, headers=headers)
            await error_response(error, scope["path"])(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] != "http" or not self._digests:
            return True
        is_open = scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS
        return is_open or self._is_known(Headers(scope=scope))

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        # No early exit: the time must not tell which key was nearly right.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
