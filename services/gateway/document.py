"""The OpenAPI document: bodies of errors, statuses and streams beside what FastAPI knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

Node = dict[str, Any]

COMPONENT = "#/components/schemas/{model}"
_MEANINGS = {
    400: "The request is malformed, or a value of it is out of range.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, response or path.",
    413: "The body is too large.",
    500: "The server failed.",
    501: "The server cannot do this.",
    503: "No engine or tokenizer can serve this at the moment.",
    504: "The time for the request is over.",
}
_ERROR: Node = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
_EVENT: Node = {
    "description": "One server-sent event.",
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
_WITH_BODY = (400, 404, 413, 500, 501, 503, 504)
_OTHERS = {
    "/health": (503,),
    "/health_generate": (500, 503, 504),
    "/ping": (503,),
    "/ready": (503,),
    "/model_info": (500, 503, 504),
    "/reset_prefix_cache": (500, 503, 504),
    "/start_profile": (400, 500, 501, 503, 504),
    "/stop_profile": (400, 500, 501, 503, 504),
    "/v1/models/{model_id}": (404,),
    "/v1/responses/{response_id}": (404,),
    "/v1/responses/{response_id}/cancel": (404, 500, 503, 504),
}
_WITHOUT_BODY = frozenset({"/health", "/ping", "/ready"})
_STREAMS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/inference/v1/generate",
    }
)


def describe(app: FastAPI, *, has_keys: bool) -> None:
    """Have `app` answer with this document. `has_keys`: whether requests need an API key."""

    def openapi() -> Node:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, has_keys=has_keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it


def _document(app: FastAPI, *, has_keys: bool) -> Node:
    document: Node = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document.setdefault("components", {})
    schemas: Node = components.setdefault("schemas", {})
    for path, operation in _operations(document):
        _hoist_definitions(operation, schemas)
        answers: Node = operation["responses"]
        answers.pop("422", None)  # every malformed request is answered with 400
        for status in (401,) * has_keys + _statuses(path, operation):
            answers[str(status)] = _failure(path, status)
        _describe_success(path, answers["200"])
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = _ERROR
    return document


def _operations(document: Node) -> Iterator[tuple[str, Node]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def _hoist_definitions(operation: Node, schemas: Node) -> None:
    """References of a body's schema are resolved from the root of the document."""
    if "requestBody" not in operation:
        return
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    for one in schema.get("anyOf", [schema]):
        schemas.update(one.pop("$defs", {}))


def _statuses(path: str, operation: Node) -> tuple[int, ...]:
    return _WITH_BODY if "requestBody" in operation else _OTHERS.get(path, ())


def _failure(path: str, status: int) -> Node:
    answer: Node = {"description": _MEANINGS[status]}
    if path not in _WITHOUT_BODY:
        schema = {"$ref": COMPONENT.format(model="Error")}
        answer["content"] = {"application/json": {"schema": schema}}
    return answer


def _describe_success(path: str, answer: Node) -> None:
    if path == "/metrics":
        answer["content"] = {"text/plain": {"schema": {"type": "string"}}}
    elif path in _WITHOUT_BODY or path == "/health_generate":
        answer.pop("content", None)
    elif path in _STREAMS:
        answer["content"]["text/event-stream"] = {"schema": _EVENT}
