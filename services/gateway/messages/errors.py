"""Errors in the shape of the Messages interface."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from services.gateway.errors import ApiError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_messages_path(path: str) -> bool:
    """Whether clients of `path` expect this shape."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_body(error: ApiError) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}}`."""
    kind = _TYPES.get(error.status, "api_error")
    message = error.message
    if error.param and error.param not in message:  # the shape has no place of its own for it
        message = f"{error.param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_response(error: ApiError, path: str) -> Response:
    """The HTTP response for `error` in the shape that clients of `path` expect."""
    if not is_messages_path(path):
        return error.response()
    body = orjson.dumps(error_body(error))
    return Response(body, error.status, error.headers, media_type="application/json")
