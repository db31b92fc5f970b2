"""Which JSON types a tool's parameter may have, from its JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from services.common.json_types import json_type

Types = frozenset[str]

NO_TYPES: Types = frozenset()
STRING: Types = frozenset({"string"})

_STANDARD = {"string", "integer", "number", "boolean", "object", "array", "null"}
_SYNONYMS = {
    "string": ("str", "text", "varchar", "char", "uuid", "date", "datetime", "time"),
    "integer": ("bigint", "smallint", "long", "short"),
    "number": ("double", "decimal", "real", "numeric"),
    "boolean": ("bool",),
    "object": ("dict", "map"),
    "array": ("list", "tuple", "set", "arr", "sequence"),
}
_EXACT = {name: type_ for type_, names in _SYNONYMS.items() for name in names}
_PREFIXES = (("int", "integer"), ("uint", "integer"), ("float", "number"))
# Deeper nesting of combinators than any real schema has.
_MAX_DEPTH = 32


def normal_type(name: str) -> str | None:
    """Return the JSON schema type that a type name means, or None."""
    lowered = re.split(r"[\[<(]", name.strip().lower())[0].strip()
    if lowered in _STANDARD:
        return lowered
    if lowered in _EXACT:
        return _EXACT[lowered]
    return next((type_ for prefix, type_ in _PREFIXES if lowered.startswith(prefix)), None)


def _union(sets: Iterable[Types]) -> Types:
    return frozenset().union(*sets)


def _intersect(left: Types, right: Types) -> Types:
    """Return the common types; an empty set says nothing; every integer is a number."""
    if not left or not right:
        return left or right
    common = left & right
    for one, other in ((left, right), (right, left)):
        if "integer" in one and "number" in other:
            common |= {"integer"}
    return common


class SchemaTypes:
    """Type sets of the schemas inside one tool; resolves `$ref` within it."""

    def __init__(self, root: object) -> None:
        self.root = root

    def types(self, schema: object, depth: int = 0) -> Types:
        """Return the types a value may have; empty when the schema does not say."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return NO_TYPES
        found = self._own(schema)
        for name, combine in (("anyOf", _union), ("oneOf", _union)):
            parts = self._parts(schema, name, depth)
            if parts and all(parts):
                found = _intersect(found, combine(parts))
            elif any(parts):
                found = found or combine(parts)
        for part in self._parts(schema, "allOf", depth):
            found = _intersect(found, part)
        if "$ref" in schema:
            found = _intersect(found, self.types(self.resolve(schema["$ref"]), depth + 1))
        return found

    def _parts(self, schema: Mapping[str, Any], name: str, depth: int) -> list[Types]:
        branches = schema.get(name)
        if not isinstance(branches, list):
            return []
        return [self.types(branch, depth + 1) for branch in branches]

    @staticmethod
    def _own(schema: Mapping[str, Any]) -> Types:
        declared = schema.get("type")
        names = declared if isinstance(declared, list) else [declared]
        types = [normal_type(name) for name in names if isinstance(name, str)]
        found = frozenset(type_ for type_ in types if type_)
        if not found and isinstance(schema.get("enum"), list):
            found = frozenset(json_type(value) for value in schema["enum"])
        if not found and "const" in schema:
            found = frozenset({json_type(schema["const"])})
        return found | {"null"} if found and schema.get("nullable") is True else found

    def resolve(self, reference: object) -> object:
        """Return the schema a local reference names, or None."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        node: object = self.root
        for step in reference[1:].split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping):
                node = node.get(key)
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                return None
        return node

    def property(self, schema: object, key: str, depth: int = 0) -> object:
        """Return the schema of an object's property, or None."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return properties[key]
        branches = [self.resolve(schema["$ref"])] if "$ref" in schema else []
        for name in ("allOf", "anyOf", "oneOf"):
            branches += schema[name] if isinstance(schema.get(name), list) else []
        for branch in branches:
            found = self.property(branch, key, depth + 1)
            if found is not None:
                return found
        additional = schema.get("additionalProperties")
        return additional if isinstance(additional, Mapping) else None


class ToolTable:
    """The declared tools of a request by name. Parses a schema when it is first needed."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        """parameters: JSON schema text (may be empty) of each tool's parameters."""
        self._texts = dict(parameters)
        self._schemas: dict[str, SchemaTypes] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._texts

    def __bool__(self) -> bool:
        return bool(self._texts)

    def names(self) -> Iterable[str]:
        """Return the names of the declared tools."""
        return self._texts.keys()

    def types(self, name: str, key: str) -> Types:
        """Return the types of a tool's parameter; empty when unknown."""
        schema = self._schema(name)
        return schema.types(schema.property(schema.root, key)) if schema else NO_TYPES

    def declares(self, name: str, key: str) -> bool:
        """Return whether a tool's schema speaks of a parameter."""
        schema = self._schema(name)
        return schema is not None and schema.property(schema.root, key) is not None

    def declares_all(self, name: str, text: str) -> bool:
        """Return whether a tool's schema speaks of every key of a JSON object's text."""
        return all(self.declares(name, key) for key in json.loads(text))

    def required(self, name: str) -> frozenset[str]:
        """Return the parameters that a tool's schema requires at its top."""
        schema = self._schema(name)
        root = schema.root if schema else None
        listed = root.get("required") if isinstance(root, Mapping) else None
        names = listed if isinstance(listed, list) else []
        return frozenset(key for key in names if isinstance(key, str))

    def _schema(self, name: str) -> SchemaTypes | None:
        if name not in self._texts:
            return None
        schema = self._schemas.get(name)
        if schema is None:
            schema = self._schemas[name] = SchemaTypes(_load(self._texts[name]))
        return schema


def _load(text: str) -> object:
    """Return the parsed schema. Its text was checked at the edge; empty text declares nothing."""
    return json.loads(text) if text else {}
