"""Raw argument text to JSON text, by the types its schema allows."""

from __future__ import annotations

import ast
import json
import math
import re

from services.tokenizer.parsing.schema import Types

_INTEGER = re.compile(r"([+-]?)0*(\d+)(?:\.0+)?")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LOOSE_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_LITERAL_MAX_CHARS = 65536
_LITERAL_MAX_DEPTH = 48
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
_SPACE = re.compile(r"\s*")
# Integers stay text: they may have any number of digits.
_DECODER = json.JSONDecoder(parse_int=str)
_NOTHING = object()
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}


def json_string(text: str) -> str:
    """Return the JSON string of the exact text; non-ASCII characters are kept."""
    return json.dumps(text, ensure_ascii=False)


def coerce(text: str, types: Types) -> str:
    """Return JSON text for a raw value: the first allowed type that fits, else a string.

    Order: null, integer, number, boolean, object, array, string.
    """
    trimmed = text.strip()
    for name, convert in _CONVERTERS:
        if name in types:
            converted = convert(trimmed)
            if converted is not None:
                return converted
    return json_string(text)


def coerce_json(text: str, types: Types) -> str:
    """Return JSON text for a raw value that its markup calls JSON.

    As `coerce`; where no allowed type fits, valid JSON stays as written. A quoted JSON string under
    a type that allows strings gives its value, any other text becomes a string.
    """
    trimmed = text.strip()
    for name, convert in _CONVERTERS:
        if name in types:
            converted = convert(trimmed)
            if converted is not None:
                return converted
    value = _loaded(trimmed)
    if isinstance(value, str):
        return json_string(_LONE_SURROGATES.sub("\ufffd", value))
    plain = "string" not in types and value is not _NOTHING
    return trimmed if plain else json_string(text)


def json_object_text(text: str) -> str | None:
    """Return the trimmed text of a strict JSON object, or None when it is not one."""
    trimmed = text.strip()
    return trimmed if trimmed.startswith("{") and isinstance(_loaded(trimmed), dict) else None


def only_value(text: str) -> tuple[str, str] | None:
    """Return the key and the JSON text of the only member of a JSON object, or None."""
    if not text[1:-1].strip():
        return None
    key, end = _DECODER.raw_decode(text, text.index('"'))
    start = _SPACE.match(text, text.index(":", end) + 1)
    assert start is not None
    end = _DECODER.raw_decode(text, start.end())[1]
    return (key, text[start.end() : end]) if text[end:].strip() == "}" else None


def _null(text: str) -> str | None:
    return "null" if text.lower() == "null" else None


def _integer(text: str) -> str | None:
    match = _INTEGER.fullmatch(text) if text.isascii() else None
    if not match:
        return None
    sign = "-" if match[1] == "-" and match[2] != "0" else ""
    return sign + match[2]


def _number(text: str) -> str | None:
    if not text.isascii() or not _LOOSE_NUMBER.fullmatch(text) or math.isinf(float(text)):
        return None
    return text if _JSON_NUMBER.fullmatch(text) else repr(float(text))


def _boolean(text: str) -> str | None:
    return _BOOLEANS.get(text.lower())


def _object(text: str) -> str | None:
    return _structure(text, "{", dict)


def _array(text: str) -> str | None:
    return _structure(text, "[(", (list, tuple))


def _structure(text: str, opens: str, kind: type | tuple[type, ...]) -> str | None:
    """Return JSON as written, or a Python literal written as JSON, when it is of that kind."""
    if not text or text[0] not in opens:
        return None
    value = _loaded(text)
    if value is _NOTHING:
        return _python_literal(text, kind)
    return text if isinstance(value, kind) else None


def _loaded(text: str) -> object:
    """Return the value of strict JSON, numbers of it unread; `_NOTHING` when it is none."""
    try:
        value: object = json.loads(
            text, parse_constant=_refuse, parse_float=_finite, parse_int=lambda _: 0
        )
    except (ValueError, RecursionError):
        return _NOTHING
    return value


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("number out of range")
    return value


def _python_literal(text: str, kind: type | tuple[type, ...]) -> str | None:
    if len(text) > _LITERAL_MAX_CHARS or _depth(text) > _LITERAL_MAX_DEPTH:
        return None
    try:
        value = ast.literal_eval(text)
        if not isinstance(value, kind):
            return None
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _depth(text: str) -> int:
    """Return an upper bound of the nesting that the literal parser would meet."""
    deepest = depth = 0
    for char in text:
        if char in "[{(":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]})":
            depth -= 1
    signs = max((len(run) for run in re.findall(r"[-+~\s]+", text) if run.strip()), default=0)
    return max(deepest, signs)


_CONVERTERS = (
    ("null", _null),
    ("integer", _integer),
    ("number", _number),
    ("boolean", _boolean),
    ("object", _object),
    ("array", _array),
)
