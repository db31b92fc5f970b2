"""Whether a value that has an end can fit a JSON schema."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from services.engine.grammar.errors import GrammarError
from services.engine.grammar.schema import JsonObject, Schema, required_of, types_of


def check_end(schema: Schema) -> None:
    """Raise GrammarError where every value contains another of its kind, without an end."""
    of: defaultdict[int, list[_Need]] = defaultdict(list)
    open_needs: dict[int, int] = {}
    finite: list[int] = []
    for node in schema.nodes:
        needs = list(_needs(node.schema, schema))
        open_needs[id(node.schema)] = len(needs)
        for need in needs:
            for part in need.parts:
                of[id(part)].append(need)
        if not needs:
            finite.append(id(node.schema))
    for number in finite:  # it grows meanwhile
        for need in of[number]:
            open_needs[need.owner] -= not need.is_met
            if not need.is_met and open_needs[need.owner] == 0:
                finite.append(need.owner)
            need.is_met = True
    if open_needs[id(schema.root)]:
        raise GrammarError("the schema allows no output that ends")


class _Need:
    """One of `parts` must have an end for `owner` to have one."""

    __slots__ = ("is_met", "owner", "parts")

    def __init__(self, owner: int, parts: list[JsonObject]) -> None:
        self.owner = owner
        self.parts = parts
        self.is_met = False


def _needs(part: JsonObject, schema: Schema) -> Iterator[_Need]:
    target = schema.target(part["$ref"]) if "$ref" in part else True
    alone = [True if target is None else target, *part.get("allOf", ()), *_needed(part)]
    choices = [part[name] for name in ("anyOf", "oneOf") if name in part]
    for choice in [*([one] for one in alone), *choices]:
        parts = [one for one in choice if isinstance(one, dict)]
        if len(parts) == sum(one is not False for one in choice):
            yield _Need(id(part), parts)


def _needed(part: JsonObject) -> list[Any]:
    """The schemas of parts that any value of an object or a list has."""
    types = types_of(part)
    if types == ["object"]:
        named = part.get("properties", {})
        return [named[name] for name in required_of(part) if name in named]
    least = part.get("minItems", 0)
    if types == ["array"] and isinstance(least, int) and least > 0:
        first = part.get("prefixItems", [])
        rest = [part.get("items", True)] if least > len(first) else []
        return [*first[:least], *rest]
    return []
