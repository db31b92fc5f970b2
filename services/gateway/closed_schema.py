"""JSON schemas whose objects take no other properties than the declared ones."""

from __future__ import annotations

from typing import Any

# Keywords by what they hold: one schema, a list of them, or an object of them by name. Parts of an
# `allOf` describe the same value together, so that closing one would forbid what another declares;
# `not` and `if` ask and declare nothing.
_ONE = frozenset({"items", "additionalItems", "contains", "then", "else", "unevaluatedItems"})
_LISTS = frozenset({"anyOf", "oneOf", "prefixItems", "items"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DECLARES = ("properties", "patternProperties")
_DECIDES = ("additionalProperties", "unevaluatedProperties", "allOf", "$ref")


def closed(schema: Any) -> Any:
    """A copy of `schema` in which objects that say nothing of further properties have none."""
    if not isinstance(schema, dict):
        return schema
    copy = {name: _within(name, value) for name, value in schema.items()}
    is_object = schema.get("type") == "object" or any(name in schema for name in _DECLARES)
    if is_object and not any(name in schema for name in _DECIDES):
        copy["additionalProperties"] = False
    return copy


def _within(name: str, value: Any) -> Any:
    if name in _NAMED and isinstance(value, dict):
        return {key: closed(part) for key, part in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [closed(part) for part in value]
    return closed(value) if name in _ONE or name == "additionalProperties" else value
