"""The parts of a JSON schema.

Keywords and their places: https://json-schema.org/draft/2020-12. Found without recursion, in time
that is linear in the size of a schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from services.engine.grammar.errors import GrammarError

JsonObject = dict[str, Any]

_ONE = frozenset(
    {
        "items", "additionalItems", "additionalProperties", "propertyNames",
        "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_NEVER_EMPTY = ("anyOf", "oneOf", "enum", "type")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# What says nothing of a value. `$defs` are looked at by themselves.
ANNOTATIONS = frozenset(
    {
        "$schema", "$comment", "$defs", "definitions", "title", "description", "default",
        "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator",
    }
)  # fmt: skip
COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "enum", "const"})
_OF_OBJECTS = frozenset(
    {
        "properties", "patternProperties", "additionalProperties", "required", "minProperties",
        "maxProperties",
    }
)  # fmt: skip
_OPEN = ("patternProperties", "additionalProperties", "minProperties")
_MAX_PLACE = 200
_INDEX = re.compile(r"[0-9]{1,9}")
_LOCAL = re.compile(r"#(/[^#]*)?")


@dataclass(frozen=True, slots=True)
class Node:
    """A schema within a schema, and where it is."""

    schema: JsonObject
    above: Node | None
    name: str

    @property
    def place(self) -> str:
        """A JSON pointer, shortened."""
        names: list[str] = []
        node: Node | None = self
        while node is not None:
            names.append(node.name)
            node = node.above
        text = "/".join(reversed(names))
        return text if len(text) <= _MAX_PLACE else f"{text[:_MAX_PLACE]}..."

    def refused(self, problem: str) -> GrammarError:
        """The error of this part."""
        return GrammarError(f"{problem}, at {self.place}")


class Schema:
    """A JSON schema and its parts, each once: also those that only references lead to.

    `root`: the value of its JSON text, which belongs to this object. Raises GrammarError for what
    is no schema.
    """

    def __init__(self, root: Any) -> None:
        if not isinstance(root, dict | bool):
            raise GrammarError("the schema is not an object")
        if root is False:
            raise GrammarError("the schema allows no output")
        self.root: JsonObject = root if isinstance(root, dict) else {}
        self.nodes: list[Node] = []
        waiting, seen = [Node(self.root, None, "#")], {id(self.root)}
        while waiting:
            node = waiting.pop()
            self.nodes.append(node)
            _check_keywords(node)
            for name, part in (*_parts(node), *self._referred(node)):
                if isinstance(part, bool) or id(part) in seen:
                    continue
                if not isinstance(part, dict):
                    raise node.refused(f"`{name[:_MAX_PLACE]}` is not a schema")
                seen.add(id(part))
                waiting.append(Node(part, node, name))

    @cached_property
    def merges(self) -> bool:
        """Whether several parts say something of one value."""
        return any(_merges(node.schema) for node in self.nodes)

    def target(self, reference: Any) -> Any:
        """What `#` and a JSON pointer behind it lead to; None for nothing and other references."""
        if not isinstance(reference, str) or not _LOCAL.fullmatch(reference):
            return None
        found: Any = self.root
        for name in unquote(reference[1:]).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and _INDEX.fullmatch(name):
                found = found[int(name)] if int(name) < len(found) else None
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found

    def _referred(self, node: Node) -> Iterator[tuple[str, Any]]:
        found = self.target(node.schema.get("$ref"))
        if found is not None:
            yield "$ref", found


def _merges(part: JsonObject) -> bool:
    combining = part.keys() & COMBINING
    if len(combining) > 1 or len(part.get("allOf", ())) > 1:
        return True
    return bool(combining and part.keys() & _OF_OBJECTS)


def _check_keywords(node: Node) -> None:
    for name in types_of(node.schema):
        if not isinstance(name, str) or name not in TYPES:
            raise node.refused(f"`type` {str(name)[:_MAX_PLACE]!r} is not known")
    for name in _NEVER_EMPTY:
        if node.schema.get(name) == []:
            raise node.refused(f"`{name}` is empty")


def _parts(node: Node) -> Iterator[tuple[str, Any]]:
    for key, value in node.schema.items():
        if key in _NAMED:
            if not isinstance(value, dict):
                raise node.refused(f"`{key}` is not an object")
            yield from ((f"{key}/{name}", part) for name, part in value.items())
        elif key in _LISTS or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise node.refused(f"`{key}` is not a list")
            yield from ((f"{key}/{number}", part) for number, part in enumerate(value))
        elif key in _ONE:
            yield key, value


def types_of(schema: JsonObject) -> list[Any]:
    """The names in `type`; none where there is no such keyword."""
    found = schema.get("type", [])
    return found if isinstance(found, list) else [found]


def required_of(schema: JsonObject) -> list[str]:
    """The names in `required`."""
    found = schema.get("required")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def is_closed(part: JsonObject) -> bool:
    """Whether a part allows the properties that it declares and no others."""
    return part.get("additionalProperties") is False and "patternProperties" not in part


def is_closable(part: JsonObject) -> bool:
    """Whether a part declares properties and speaks of no others. xgrammar takes it so too."""
    if "properties" not in part or part.keys() & (COMBINING | set(_OPEN)):
        return False
    return set(required_of(part)) <= set(part["properties"])
