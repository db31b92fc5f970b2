"""The one place where failures become HTTP statuses and OpenAI error bodies."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import grpc
import orjson
from starlette.responses import Response
from warhorse.v1 import common_pb2

from services.common.errors import ServiceError

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1200
MAX_ECHO = 200

BAD_REQUEST = "BadRequestError"
SCHEMA = "Bad Request"
NOT_FOUND = "NotFoundError"
NOT_SUPPORTED = "NotImplementedError"
UNAVAILABLE = "ServiceUnavailableError"
BUSY = "Service Unavailable"
INTERNAL = "InternalServerError"

_R = common_pb2

# reason -> (HTTP status, type); reasons that are absent are our own faults: 500.
_BY_REASON: dict[int, tuple[int, str]] = {
    _R.ERROR_REASON_INVALID_FIELD: (400, BAD_REQUEST),
    _R.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED: (400, BAD_REQUEST),
    _R.ERROR_REASON_TEMPLATE: (400, BAD_REQUEST),
    _R.ERROR_REASON_MODEL_NOT_FOUND: (404, NOT_FOUND),
    _R.ERROR_REASON_QUEUE_FULL: (503, BUSY),
    _R.ERROR_REASON_POOL_EXHAUSTED: (503, BUSY),
    _R.ERROR_REASON_SLOW_CONSUMER: (503, UNAVAILABLE),
    _R.ERROR_REASON_STALE_GENERATION: (503, UNAVAILABLE),
    _R.ERROR_REASON_LAYOUT_MISMATCH: (503, UNAVAILABLE),
    _R.ERROR_REASON_LOADING: (503, UNAVAILABLE),
    _R.ERROR_REASON_DRAINING: (503, UNAVAILABLE),
    _R.ERROR_REASON_ENGINE_LOST: (503, UNAVAILABLE),
    _R.ERROR_REASON_CANCELLED: (503, UNAVAILABLE),
    _R.ERROR_REASON_DEADLINE: (504, "TimeoutError"),
    _R.ERROR_REASON_UNSUPPORTED: (501, NOT_SUPPORTED),
}
_IMAGES = "images"
_INDEX = re.compile(r"\[(\d+)\]")
_ENGINE_GROUPS = frozenset({"sampling", "stopping", "output"})
_RETRY_LATER = frozenset({_R.ERROR_REASON_QUEUE_FULL, _R.ERROR_REASON_POOL_EXHAUSTED})


class ApiError(Exception):
    """A failure as the client sees it: HTTP status and the four fields of an error body."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
        self.param = param if param is None else shorten(param, MAX_ECHO)
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, round(retry_after)))

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}` of openai-compatible servers."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return {"error": error}

    def response(self) -> Response:
        """A plain HTTP response with this error."""
        return Response(
            orjson.dumps(self.body()), self.status, self.headers, media_type="application/json"
        )


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400 for a request whose values do not fit."""
    return ApiError(400, BAD_REQUEST, message, param=param)


def unsupported(what: str, param: str) -> ApiError:
    """400 for a field that is known but has no implementation here."""
    return bad_request(f"{what} is not currently supported.", param)


def shorten(value: object, limit: int = MAX_ECHO) -> str:
    """`value` as text of at most `limit` characters, for echoing input in messages."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def to_api_error(error: BaseException) -> ApiError:
    """What the client is told about `error`. Logs what it is not told."""
    match error:
        case ApiError():
            return error
        case ServiceError():
            return _from_service_error(error)
        case BaseExceptionGroup():
            return to_api_error(error.exceptions[0])
        case _:
            logger.error("request failed", exc_info=error)
            return ApiError(500, INTERNAL, "The server failed to process the request.")


def _from_service_error(error: ServiceError) -> ApiError:
    status, kind = _status_of(error)
    if status == 500:
        logger.error("request failed: %s", error.message)
        return ApiError(500, INTERNAL, "The server failed to process the request.")
    retry_after = error.retry_after
    if retry_after is None and error.reason in _RETRY_LATER:
        retry_after = 1.0
    param = _client_field(error.field) or ("model" if status == 404 else None)
    return ApiError(status, kind, error.message, param=param, retry_after=retry_after)


def _client_field(field: str) -> str:
    """The name of an engine's field as HTTP requests have it: `sampling.top_p` -> `top_p`."""
    if field.startswith(_IMAGES):
        return "messages"
    field = _INDEX.sub(r".\1", field)
    group, dot, name = field.partition(".")
    return name if dot and group in _ENGINE_GROUPS else field


def _status_of(error: ServiceError) -> tuple[int, str]:
    if error.reason == _R.ERROR_REASON_UNSUPPORTED and error.field.startswith(_IMAGES):
        return 400, BAD_REQUEST  # as for a model whose tokenizer knows of no images
    if error.reason in _BY_REASON:
        return _BY_REASON[error.reason]
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return 503, UNAVAILABLE
    return 500, INTERNAL
