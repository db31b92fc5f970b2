"""What a JSON schema says, in the keywords that both libraries know."""

from __future__ import annotations

from typing import Any

from services.engine.grammar.schema import (
    ANNOTATIONS,
    COMBINING,
    JsonObject,
    Schema,
    required_of,
)

_FORMATS = frozenset(
    {
        "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    }
)  # fmt: skip
OTHER_FORMATS = frozenset(
    {
        "idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template",
        "json-pointer", "relative-json-pointer", "regex",
    }
)  # fmt: skip
# Patterns that libraries write beside a format, without the look-around that llguidance lacks.
_ALIKE = {
    # Addresses of Zod 4, https://github.com/colinhacks/zod: no dot at an end, nor two in a row.
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$":
    r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$",
}  # fmt: skip
_DECLARING = ("properties", "patternProperties")


def reword(schema: Schema) -> None:
    """Say in the keywords that both libraries know what others say."""
    for node in schema.nodes:
        part = node.schema
        part.pop("$schema", None)
        _require_tag(part, schema)
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        if isinstance(part.get("pattern"), str):
            part["pattern"] = _ALIKE.get(part["pattern"], part["pattern"])
        known = part.get("format")
        if isinstance(known, str) and known not in _FORMATS | OTHER_FORMATS:
            del part["format"]  # of no draft
        if not isinstance(part.get("items"), list) and "items" in part:
            part.pop("additionalItems", None)
        if not part.keys() & COMBINING:
            _reword_object(part, schema)


def _require_tag(part: JsonObject, schema: Schema) -> None:
    """A discriminator's property is required, also where it has a default.

    https://spec.openapis.org/oas/v3.1.0#discriminator-object. llguidance takes the keyword for a
    proof that choices exclude each other, so it goes.
    """
    found = part.pop("discriminator", None)
    name = found.get("propertyName") if isinstance(found, dict) else None
    for choice in part.get("oneOf", ()) if isinstance(name, str) else ():
        inner = (
            schema.target(choice["$ref"])
            if isinstance(choice, dict) and "$ref" in choice
            else choice
        )
        is_tagged = isinstance(inner, dict) and name in inner.get("properties", {})
        if is_tagged and name not in required_of(inner):
            inner["required"] = [*required_of(inner), name]


def _reword_object(part: JsonObject, schema: Schema) -> None:
    if part.get("unevaluatedProperties") is False:
        del part["unevaluatedProperties"]
        part.setdefault("additionalProperties", False)
    names = _names(part.get("propertyNames", True), schema)
    if names == []:
        part.pop("propertyNames", None)
    elif names and part.get("type") == "object" and not part.keys() & set(_DECLARING):
        del part["propertyNames"]
        part["properties"] = dict.fromkeys(names, part.get("additionalProperties", True))
        part["additionalProperties"] = False


def _names(part: Any, schema: Schema) -> list[str] | None:
    """The names that a schema of names lists; empty where it takes all, None where unknown."""
    if isinstance(part, dict) and part.keys() - ANNOTATIONS == {"$ref"}:
        part = schema.target(part["$ref"])
    if part is True:
        return []
    if not isinstance(part, dict) or not part.keys() - ANNOTATIONS <= {"type", "enum", "const"}:
        return None
    if part.get("type", "string") != "string":
        return None
    values = part.get("enum", [part["const"]] if "const" in part else [])
    is_list = isinstance(values, list) and not {"enum", "const"} <= part.keys()
    return values if is_list and all(isinstance(value, str) for value in values) else None
