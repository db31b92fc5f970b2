"""`oneOf` whose choices are seen to be apart, which is `anyOf` then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from services.common.json_types import json_type
from services.engine.grammar.schema import (
    JsonObject,
    Schema,
    is_closable,
    is_closed,
    required_of,
    types_of,
)

_MAX_DEPTH = 8  # of references and choices within a choice
_KINDS = {"integer": "number"}  # other types are kinds of their own
_SCALARS = frozenset({"null", "boolean", "number", "string"})


@dataclass(frozen=True, slots=True)
class _Shape:
    """Values of one kind; those of the schema are among them.

    `values`: all that there are, None where that is not known. Of objects: `tags`, the values of
    members that each of them has, `required`, other names that each has, and `allowed`, the names
    that one may have, None for any. `is_closed`: the schema allows no others; else the grammar.
    """

    kind: str
    values: frozenset[Any] | None = None
    tags: dict[str, frozenset[Any]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None
    is_closed: bool = False


def choose_any(schema: Schema) -> None:
    """Turn each `oneOf` into `anyOf`. Raises GrammarError where two choices may fit together."""
    for node in schema.nodes:
        if "oneOf" not in node.schema:
            continue
        if not _are_apart(node.schema["oneOf"], schema):
            raise node.refused("choices of `oneOf` may fit together")
    for node in schema.nodes:
        choices = node.schema.pop("oneOf", None)
        if choices is not None and "anyOf" in node.schema:
            node.schema.setdefault("allOf", []).append({"anyOf": choices})
        elif choices is not None:
            node.schema["anyOf"] = choices


def _are_apart(choices: Sequence[Any], schema: Schema) -> bool:
    if len(choices) == 1:
        return True
    by_kind: defaultdict[str, list[list[_Shape]]] = defaultdict(list)
    for choice in choices:
        shapes = _shapes(choice, schema, _MAX_DEPTH)
        if shapes is None:
            return False
        own: defaultdict[str, list[_Shape]] = defaultdict(list)
        for shape in shapes:
            own[shape.kind].append(shape)
        for kind, alike in own.items():
            by_kind[kind].append(alike)
    return all(len(groups) == 1 or _differ(kind, groups) for kind, groups in by_kind.items())


def _differ(kind: str, groups: list[list[_Shape]]) -> bool:
    """Whether the shapes of different choices have no value in common."""
    if kind in _SCALARS:
        return _disjoint([[shape.values for shape in group] for group in groups])
    return all(
        _differ_as_objects(one, other)
        for group, further in combinations(groups, 2)
        for one in group
        for other in further
    )


def _differ_as_objects(one: _Shape, other: _Shape) -> bool:
    """Whether no value fits both. Where the grammar alone closes one, that proves but one side."""
    pairs = ((one, other), (other, one))
    lacking = [a for a, b in pairs if a.allowed is not None and not b.required <= a.allowed]
    if len(lacking) == 2 or any(shape.is_closed for shape in lacking):
        return True
    names = one.tags.keys() & other.tags.keys()
    return any(one.tags[name].isdisjoint(other.tags[name]) for name in names)


def _disjoint(groups: list[list[frozenset[Any] | None]]) -> bool:
    seen: set[Any] = set()
    for group in groups:
        own: set[Any] = set()
        for values in group:
            if values is None:
                return False
            own |= values
        if not seen.isdisjoint(own):
            return False
        seen |= own
    return True


def _shapes(part: Any, schema: Schema, depth: int) -> list[_Shape] | None:
    """Shapes that hold all values of a schema; None where that is not seen."""
    if not isinstance(part, dict) or depth == 0:
        return [] if part is False else None
    values = _values(part, schema, 1)
    if values is not None:
        kinds = {kind for kind, _ in values}
        return [_Shape(kind, frozenset(v for v in values if v[0] == kind)) for kind in kinds]
    if "type" in part:
        return [_of_type(name, part, schema) for name in set(types_of(part))]
    for inner in _inner(part, schema):
        lists = [_shapes(one, schema, depth - 1) for one in inner]
        found = [shape for shapes in lists if shapes is not None for shape in shapes]
        if None not in lists:
            return found
    return None


def _of_type(name: Any, part: JsonObject, schema: Schema) -> _Shape:
    if name != "object":
        return _Shape(_KINDS.get(name, name))
    has_bounds = is_closed(part) or (not schema.merges and is_closable(part))
    allowed = frozenset(part.get("properties", {})) if has_bounds else None
    tags = dict(_tags(part, schema))
    # A tag may be required by the grammar alone.
    required = frozenset(required_of(part)) - tags.keys()
    return _Shape(name, None, tags, required, allowed, is_closed(part))


def _inner(part: JsonObject, schema: Schema) -> Iterator[list[Any]]:
    """Lists of schemas of which a value fits at least one."""
    if "$ref" in part:
        yield [schema.target(part["$ref"])]
    yield from ([one] for one in part.get("allOf", ()))
    yield from (part[name] for name in ("anyOf", "oneOf") if name in part)


def _tags(part: JsonObject, schema: Schema) -> Iterator[tuple[str, frozenset[Any]]]:
    named = part.get("properties", {})
    for name in required_of(part):
        values = _values(named.get(name), schema, _MAX_DEPTH)
        if values is not None:
            yield name, values


def _values(part: Any, schema: Schema, depth: int) -> frozenset[tuple[str, Any]] | None:
    """The values that a schema lists, with their kinds; None for another schema, or for lists."""
    if not isinstance(part, dict) or depth == 0:
        return None
    if "const" not in part and "enum" not in part:
        return _values(schema.target(part.get("$ref")), schema, depth - 1)
    listed = [part["const"]] if "const" in part else part["enum"]
    if not isinstance(listed, list) or any(isinstance(value, list | dict) for value in listed):
        return None
    return frozenset((_kind(value), value) for value in listed)


def _kind(value: Any) -> str:
    found = json_type(value)
    return _KINDS.get(found, found)
