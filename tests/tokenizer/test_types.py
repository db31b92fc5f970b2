"""Types from schemas and the coercion of raw values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.parsing.coerce import coerce
from services.tokenizer.parsing.schema import SchemaTypes, ToolTable

ALL = ["null", "integer", "number", "boolean", "object", "array", "string"]


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, set()),
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"enum": ["a", 1, None, 1.5, True]}, {"string", "integer", "null", "number", "boolean"}),
        ({"type": "string", "enum": ["a", "b"]}, {"string"}),
        ({"const": [1]}, {"array"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"type": "integer"}, {"const": "x"}]}, {"integer", "string"}),
        ({"allOf": [{"type": ["integer", "null"]}, {"type": "number"}]}, {"integer"}),
        ({"allOf": [{"description": "d"}, {"type": "number"}]}, {"number"}),
        ({"$ref": "#/$defs/k"}, {"integer"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/$defs/none"}, set()),
        ({"$ref": "other.json"}, set()),
        ({"type": "varchar"}, {"string"}),
        ({"type": "uint32"}, {"integer"}),
        ({"type": "float64"}, {"number"}),
        ({"type": "dict"}, {"object"}),
        ({"type": "list[int]"}, {"array"}),
        ({"type": "datetime"}, {"string"}),
        ({"type": "whatever"}, set()),
        (True, set()),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str]) -> None:
    root = {"$defs": {"k": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert SchemaTypes(root).types(schema) == types


def test_types_of_a_parameter() -> None:
    schema = {
        "$defs": {"args": {"properties": {"q": {"type": "integer"}}}},
        "properties": {"p": {"$ref": "#/properties/q/anyOf/0"}, "q": {"anyOf": [{"type": "null"}]}},
        "allOf": [{"$ref": "#/$defs/args"}],
        "additionalProperties": {"type": "boolean"},
    }
    tools = ToolTable({"t": json.dumps(schema), "empty": ""})
    assert tools.types("t", "p") == {"null"}
    assert tools.types("t", "other") == {"boolean"}
    assert tools.types("empty", "p") == tools.types("unknown", "p") == set()


@pytest.mark.parametrize(
    ("text", "types", "json_text"),
    [
        ("7", "string", '"7"'),
        ("null", "string", '"null"'),
        ("NULL", "string null", "null"),
        ("7", "integer", "7"),
        (" 7 ", "integer", "7"),
        ("+07", "integer", "7"),
        ("-0", "integer", "0"),
        ("5.0", "integer", "5"),
        ("5.5", "integer", '"5.5"'),
        ("9" * 5000, "integer", "9" * 5000),
        ("1.50", "number", "1.50"),
        ("1e5", "number", "1e5"),
        (".5", "number", "0.5"),
        ("1e400", "number", '"1e400"'),
        ("NaN", "number", '"NaN"'),
        ("Infinity", "number", '"Infinity"'),
        ("1_000", "number", '"1_000"'),
        ("٣", "integer", '"٣"'),
        ("True", "boolean", "true"),
        ("0", "boolean", "false"),
        ("1", "boolean integer", "1"),
        ("yes", "boolean", '"yes"'),
        ('{"q":1}', "string", '"{\\"q\\":1}"'),
        ('{"q": 1.50, "q": 2}', "object", '{"q": 1.50, "q": 2}'),
        ("{'q': True, 'r': None}", "object", '{"q": true, "r": null}'),
        ("[1, 2]", "array", "[1, 2]"),
        ("(1, 2)", "array", "[1, 2]"),
        ("[1, 2]", "object", '"[1, 2]"'),
        ('[NaN, "a"]', "array", '"[NaN, \\"a\\"]"'),
        ("[1e400]", "array", '"[1e400]"'),
        ("[1, 2", "array", '"[1, 2"'),
        ("__import__('os')", "object array", "\"__import__('os')\""),
        ("x\n", "integer string", '"x\\n"'),
        ("é", "integer", '"é"'),
    ],
)
def test_coercion(text: str, types: str, json_text: str) -> None:
    assert coerce(text, frozenset(types.split())) == json_text


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(max_size=20) | st.text("0123456789.eE+-[]{},:\"' truefalsnN", max_size=16),
    types=st.sets(st.sampled_from(ALL)),
)
def test_coercion_always_gives_strict_json(text: str, types: set[str]) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(name)

    json.loads(coerce(text, frozenset(types)), parse_constant=refuse)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{'a':" * 5000, "[" + "-" * 10_000 + "1]", "[" + "- " * 9000 + "1]"]
)
def test_deep_nesting_is_a_string(text: str) -> None:
    assert coerce(text, frozenset(["array", "object"])) == json.dumps(text)
