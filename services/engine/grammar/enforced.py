"""Which JSON schemas xgrammar keeps to, and how llguidance is made to keep to the others.

Found by walks through the grammars of both. xgrammar ignores what it does not know, and most of
what stands beside a reference, a combination or a list of values; so it gets the schemas alone
whose every part is of a form that it keeps to. llguidance combines all parts of a schema and
refuses most of what it does not know; the rest is refused here. A keyword that no draft has is an
annotation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from services.common.json_types import json_type
from services.engine.grammar.forms import MAX_WHITESPACE
from services.engine.grammar.reword import OTHER_FORMATS
from services.engine.grammar.schema import (
    ANNOTATIONS,
    COMBINING,
    JsonObject,
    Node,
    Schema,
    is_closable,
    is_closed,
    required_of,
    types_of,
)

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Type -> the keywords that xgrammar keeps to beside it.
_BESIDE: Mapping[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "string": frozenset(),
    "integer": frozenset(_BOUNDS),
    "number": frozenset(_BOUNDS),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset(
        {
            "properties", "required", "additionalProperties", "minProperties", "maxProperties",
        }
    ),
}  # fmt: skip
# xgrammar takes references to these places alone; llguidance resolves any.
_REFERENCE = re.compile(r"#(/(\$defs|definitions)/[\w.-]+)?", re.ASCII)
_EXACT_DIGITS = 5  # behind the point, of a bound; xgrammar rounds to six
_EXACT_INTEGER = 2**53  # llguidance calculates in doubles
_TINY, _TINY_PART = 1e-9, 1e-12

_IGNORED_BY_BOTH = (
    "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "contains",
    "minContains", "maxContains", "uniqueItems", "not", "if", "then", "else", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems",
    "unevaluatedProperties", "extends", "disallow", "divisibleBy",
)  # fmt: skip
# Without \u, as it spells a declared property in another way.
_ESCAPES = 'nrbtf\\"'
# Between parts, as much as xgrammar gives.
_WHITESPACE = {"whitespace_pattern": f"[ \\n\\r\\t]{{1,{MAX_WHITESPACE}}}"}


def fits_xgrammar(schema: Schema) -> bool:
    """Whether xgrammar keeps to all of the schema."""
    return all(_is_kept(node.schema) for node in schema.nodes)


def _is_kept(part: JsonObject) -> bool:
    keys = part.keys() - ANNOTATIONS
    combining = keys & COMBINING
    if not keys:
        return True
    if not combining:
        return _is_kept_type(part, keys)
    if len(combining) > 1 or not keys <= combining | {"type"}:
        return False
    return _fit_type(part) if "type" in keys else _is_kept_alone(part)


def _is_kept_alone(part: JsonObject) -> bool:
    if "$ref" in part:
        return isinstance(part["$ref"], str) and _REFERENCE.fullmatch(part["$ref"]) is not None
    return "oneOf" not in part and len(part.get("allOf", (True,))) == 1


def _fit_type(part: JsonObject) -> bool:
    """Whether a list of values, or one, keeps to the type beside it."""
    values = [part["const"]] if "const" in part else part.get("enum")
    if not isinstance(values, list):
        return False
    return all(any(_is_of(value, name) for name in types_of(part)) for value in values)


def _is_of(value: Any, name: Any) -> bool:
    found = json_type(value)
    return bool(name == found or (name == "number" and found == "integer"))


def _is_kept_type(part: JsonObject, keys: set[str]) -> bool:
    types = types_of(part) or [_implied(keys)]
    if None in types or not keys <= {"type"}.union(*(_BESIDE[name] for name in types)):
        return False
    return _is_kept_object(part) and _is_kept_list(part) and _is_kept_number(part, types)


def _implied(keys: set[str]) -> str | None:
    """xgrammar takes what has these keywords for one type, and narrows the rest of a schema so."""
    if "properties" in keys:
        return "object"
    return "array" if keys & {"items", "prefixItems"} else None


def _is_kept_object(part: JsonObject) -> bool:
    named = part.get("properties", {})
    if part.keys() & {"required", "maxProperties"} and "properties" not in part:
        return False  # nothing but an empty object would pass
    if not set(required_of(part)) <= named.keys():
        return False
    if named and part.get("additionalProperties", False) is not False:
        return False  # a name with \u would pass as another one
    # Names may come twice, unless they are declared.
    return _is_count(part.get("minProperties", 0), None if named else 1)


def _is_count(value: Any, most: int | None = None) -> bool:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return is_count and (most is None or value <= most)


def _is_kept_list(part: JsonObject) -> bool:
    counts = [part[name] for name in ("minItems", "maxItems") if name in part]
    if counts and not part.keys() & {"items", "prefixItems"}:
        return False  # nothing but an empty list would pass
    return all(map(_is_count, counts)) and not isinstance(part.get("items"), list)


def _is_kept_number(part: JsonObject, types: list[Any]) -> bool:
    bounds = [part[name] for name in _BOUNDS if name in part]
    if not all(map(_is_number, bounds)):
        return False
    if "number" not in types:
        return True
    return all(
        abs(bound) < _EXACT_INTEGER and round(bound, _EXACT_DIGITS) == bound for bound in bounds
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def for_llguidance(schema: Schema, whitespace: Mapping[str, Any]) -> str:
    """The schema as text for llguidance; `whitespace`: its rules of that.

    Some values are left out, none of which an output needs; the schema itself is changed so, and
    has no `oneOf`. Raises GrammarError for what llguidance does not keep to.
    """
    for node in schema.nodes:
        _clamp(node.schema)
        _check(node)
    _narrow(schema)
    options = {"json_allowed_escapes": _ESCAPES, **(whitespace or _WHITESPACE)}
    return json.dumps({**schema.root, "x-guidance": options})


def _narrow(schema: Schema) -> None:
    for node in schema.nodes:
        if types_of(node.schema) != ["integer"]:
            _include(node.schema, "exclusiveMinimum", "minimum", 1, max)
            _include(node.schema, "exclusiveMaximum", "maximum", -1, min)
        if not schema.merges:
            _close(node.schema)


def _clamp(part: JsonObject) -> None:
    """Leave out whole numbers that are not exact: bounds of 64 bits are common."""
    for name in _BOUNDS:
        bound = part.get(name)
        if isinstance(bound, int) and not isinstance(bound, bool):
            is_upper = name.lower().endswith("maximum")
            part[name] = min(bound, _EXACT_INTEGER) if is_upper else max(bound, -_EXACT_INTEGER)


def _include(
    part: JsonObject, excluding: str, including: str, inside: int, narrower: Callable[..., float]
) -> None:
    """Move a bound that is excluded inwards: llguidance lets whole ones pass beside fractions."""
    bound = part.get(excluding)
    if isinstance(bound, int | float) and bound == int(bound):
        moved = bound + inside * max(_TINY, abs(bound) * _TINY_PART)
        part[including] = narrower(moved, part.get(including, moved))
        del part[excluding]


def _check(node: Node) -> None:
    part = node.schema
    for name in _IGNORED_BY_BOTH:
        if name in part:
            raise node.refused(f"`{name}` is not supported")
    if isinstance(part.get("format"), str) and part["format"] in OTHER_FORMATS:
        raise node.refused(f"`format` {part['format']!r} is not supported")
    if "additionalItems" in part and ("prefixItems" in part or part.keys() & COMBINING):
        raise node.refused("`additionalItems` is not supported here")
    if "prefixItems" in part and isinstance(part.get("items"), list):
        raise node.refused("`items` is a list beside `prefixItems`")
    _check_numbers(node)
    _check_count(node)


def _check_numbers(node: Node) -> None:
    for name in ("const", "enum", *_BOUNDS):
        value = node.schema.get(name, 0)
        if name in _BOUNDS and not _is_number(value):
            raise node.refused(f"`{name}` is not a number")
        if not _is_exact(value):
            raise node.refused(f"`{name}` has a number beyond 2**53")


def _is_exact(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) <= _EXACT_INTEGER


def _check_count(node: Node) -> None:
    """Names that are not declared may come twice: a number of them cannot be asked for."""
    part = node.schema
    least = part.get("minProperties", 0)
    if not is_closed(part) and isinstance(least, int) and least > len(set(required_of(part))) + 1:
        raise node.refused("`minProperties` is not supported")


def _close(part: JsonObject) -> None:
    """Take declared properties for all that there are, as xgrammar does."""
    if "properties" in part and not part.keys() & COMBINING:
        part.setdefault("type", "object")
    if is_closable(part):
        part["additionalProperties"] = False
