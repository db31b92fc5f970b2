"""From the bytes of a request to a valid request object, or an ApiError that names the field."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from services.gateway.errors import SCHEMA, ApiError, shorten
from services.gateway.unsupported import Harmless, refuse_unsupported

MAX_ENTRIES = 10
MAX_PARTS = 100_000  # of a field: 33,000 short messages, 7,000 rounds of tool calls
MAX_DISCARDED = 4  # times the limit: larger bodies get their answer at once, heard or not
MEBIBYTE = 1 << 20
# The JSON library reads 1024 levels and writes 254.
_WRAPPERS = 20
_NESTED = frozenset({dict, list})

M = TypeVar("M", bound=BaseModel)


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError 400 or 413; never holds more than `max_bytes`."""
    _check_content_type(request.headers.get("content-type", "application/json"))
    fields = _parse_object(await _read_bounded(request, max_bytes))
    _check_parts(fields)
    return fields


def validate(model: type[M], fields: dict[str, Any], table: Mapping[str, Harmless]) -> M:
    """Check `fields` against `model` and the tables of what is not supported."""
    try:
        valid = model.model_validate(fields)
    except ValidationError as error:
        raise _schema_error(model, error) from None
    refuse_unsupported(fields, table)
    return valid


def validate_open(model: type[M], fields: dict[str, Any], table: Mapping[str, Harmless]) -> M:
    """Like `validate`, for a model whose fields hold plain objects: their depth is bounded here."""
    _check_depth(fields)
    return validate(model, fields, table)


def _check_content_type(value: str) -> None:
    kind = value.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        message = f"The content type must be application/json, got {shorten(kind, 80)!r}."
        raise ApiError(400, SCHEMA, message)


async def _read_bounded(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        if int(announced) <= MAX_DISCARDED * max_bytes and "expect" not in request.headers:
            await _discard(request)
        raise _too_large(max_bytes)
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > max_bytes:
                raise _too_large(max_bytes)
            pieces.append(piece)
    except ClientDisconnect:
        raise ApiError(400, SCHEMA, "The connection closed before the body's end.") from None
    return b"".join(pieces)


async def _discard(request: Request) -> None:
    """Read a body to its end: most clients hear an answer only when they have sent all."""
    with contextlib.suppress(ClientDisconnect):
        async for _ in request.stream():
            pass


def _too_large(max_bytes: int) -> ApiError:
    message = f"The request body is larger than {max_bytes // MEBIBYTE} MiB."
    return ApiError(413, "request_too_large", message, headers={"Connection": "close"})


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, SCHEMA, _syntax_message(body, error)) from None
    if not isinstance(value, dict):
        raise ApiError(400, SCHEMA, f"The body must be a JSON object, got {_kind(value)}.")
    return value


def _check_parts(fields: dict[str, Any]) -> None:
    """Refuse what takes long to check: all other requests wait meanwhile."""
    for name, value in fields.items():
        if (count := _parts(value)) > MAX_PARTS:
            shown = shorten(name, 80)
            message = f"`{shown}` may hold {MAX_PARTS} fields and items, got at least {count}."
            raise ApiError(400, SCHEMA, message, param=shown)


def _parts(value: Any) -> int:
    """Fields of objects and items of lists in `value`, at all depths; ends above MAX_PARTS.

    Items of a list of nothing but texts and numbers, such as token ids, do not count.
    """
    count, found = 0, [value]
    while found and count <= MAX_PARTS:
        item = found.pop()
        if isinstance(item, dict):
            count += len(item)
            found.extend(item.values())
        elif isinstance(item, list) and not _NESTED.isdisjoint(map(type, item)):
            count += len(item)
            found.extend(item)
    return count


def _check_depth(fields: dict[str, Any]) -> None:
    """Refuse what is read but could not be written again, with all that answers wrap around it."""
    for name, value in fields.items():
        for _ in range(_WRAPPERS):
            value = [value]
        try:
            orjson.dumps(value)
        except TypeError:
            message = f"`{shorten(name, 80)}` is nested too deeply."
            raise ApiError(400, SCHEMA, message, param=shorten(name, 80)) from None


def _syntax_message(body: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as broken:
        return f"The body is not valid UTF-8 (byte {broken.start})."
    return f"The body is not valid JSON: {shorten(error.msg)} (line {error.lineno})."


def _schema_error(model: type[BaseModel], error: ValidationError) -> ApiError:
    entries = error.errors(include_url=False)
    shown = [_describe(model, entry) for entry in entries[:MAX_ENTRIES]]
    if len(entries) > MAX_ENTRIES:
        shown.append(f"and {len(entries) - MAX_ENTRIES} more")
    return ApiError(400, SCHEMA, "; ".join(shown) + ".", param=_path(entries[0]["loc"]))


def _describe(model: type[BaseModel], entry: Any) -> str:
    """One entry as `` `field` must be ..., got ... ``."""
    loc: Sequence[str | int] = entry["loc"]
    path = shorten(_path(loc), 80)
    if entry["type"] == "missing":
        return f"`{path}` is required"
    got = _echo(entry["input"])
    if entry["type"] == "wrong_value":
        return f"`{path}` must be {entry['ctx']['wanted']}, got {got}"
    field = model.model_fields.get(str(loc[0])) if len(loc) == 1 else None
    if field is not None and field.description:
        return f"`{path}` must be {field.description}, got {got}"
    return f"`{path}`: {shorten(entry['msg'])}, got {got}"


def _path(loc: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in loc)


def _echo(value: Any) -> str:
    if isinstance(value, dict | list):
        return _kind(value)
    limit = 60
    text = (
        orjson.dumps(value[:limit] + ("…" if len(value) > limit else ""))
        if isinstance(value, str)
        else orjson.dumps(value)
    )
    return text.decode()


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    if isinstance(value, list) and not value:
        return "an empty list"
    return names.get(type(value), "null" if value is None else "a number")
