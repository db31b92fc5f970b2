"""JSON schemas: an output that ends is a valid document, or the schema is refused by name."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, Field

from services.engine.grammar.errors import GrammarError
from services.engine.grammar.service import FIXED_WHITESPACE
from tests.engine.grammar.support import NANO, VOCAB, compile_grammar, compiled, fits, wander

INT: dict[str, Any] = {"type": "integer"}
TEXT: dict[str, Any] = {"type": "string"}
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
A, B = {"a": INT}, {"b": TEXT}
ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
XGRAMMAR, LLGUIDANCE = b"x", b"l"


def an_object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str | None = None
    color: Color = Color.RED


class Owner(BaseModel):
    """A title, `default`s, `$defs`, an array with bounds, a union that a field tells apart."""

    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = Field(min_length=1)
    either: Cat | Dog | None = None
    counts: dict[str, int] = {}
    by_color: dict[Color, bool] = {}
    pair: tuple[int, str] = (1, "a")


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: float = Field(gt=0, le=0.5)
    code: str = Field("a1", pattern="^[a-c][0-9]+$", max_length=3)
    # Names of keywords.
    not_: bool = Field(False, alias="not")
    contains: list[Tree] = Field([], max_length=2)


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    a: int


SAMPLES: dict[type[BaseModel], Any] = {
    Owner: {
        "pets": [{"kind": "cat", "lives": 9}, {"kind": "dog", "name": None, "color": "blue"}],
        "either": {"kind": "dog", "color": "red"},
        "counts": {"x": 1, "y": 2},
        "by_color": {"red": True},
        "pair": [7, "seven"],
    },
    Tree: {"value": 0.25, "code": "b2", "not": True, "contains": [{"value": 0.5}]},
    Open: {"a": 1, "more": [None]},
}

# A schema, and a document that it must let pass.
XGRAMMARS: list[tuple[Any, Any]] = [
    (True, [1, {"a": None}]),
    ({"type": "object"}, {"any": [1.5]}),
    (an_object(A | B, "a"), {"a": 1, "b": "x"}),
    (an_object({"not": INT, "if": INT, "contains": INT, "$ref": INT}, "not"), {"not": 1}),
    (an_object(A, additionalProperties=False, title="t", description="d", default={}), {"a": 1}),
    (an_object(A, unevaluatedProperties=False), {"a": 1}),
    (an_object({"a": {"type": "string", "format": "path"}}), {"a": "x/y"}),
    ({"type": "object", "additionalProperties": INT}, {"a": 1, "b": 2}),
    ({"type": "object", "propertyNames": TEXT, "additionalProperties": INT}, {"q": 1}),
    (
        {
            "type": "object",
            "propertyNames": {"enum": ["a", "b"]},
            "additionalProperties": INT,
            "required": ["b"],
        },
        {"b": 2},
    ),
    (an_object(A | B, minProperties=1), {"b": "x"}),
    ({"properties": A}, {"a": 1}),
    ({"type": ["object", "null"], "properties": A}, None),
    ({"type": "array", "items": INT, "minItems": 1, "maxItems": 2}, [1, 2]),
    ({"type": "array", "prefixItems": [INT, TEXT], "items": False, "minItems": 2}, [1, "a"]),
    ({"type": "integer", "minimum": 3, "maximum": 17}, 17),
    ({"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 1}, 0.25),
    ({"const": 9007199254740993}, 9007199254740993),
    ({"enum": [1, "a", None, {"b": [1]}]}, {"b": [1]}),
    ({"type": ["string", "null"], "enum": ["a", None]}, "a"),
    ({"$ref": "#/$defs/n", "description": "d", "$defs": {"n": INT}}, 5),
    ({"allOf": [{"$ref": "#/definitions/n"}], "definitions": {"n": INT}}, 5),
    ({"anyOf": [INT, an_object({"a": {"$ref": "#"}})]}, {"a": {"a": 3}}),
    ({"oneOf": [INT, TEXT, {"type": "null"}]}, None),
    (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {
                "a": an_object({"k": {"const": "a"}} | A, "k"),
                "b": an_object({"k": {"const": "b"}} | B, "k"),
            },
        },
        {"k": "b", "b": "x"},
    ),
    ({"oneOf": [an_object(A, "a"), an_object(B, "b")]}, {"b": "x"}),
    ({"oneOf": [an_object(A, additionalProperties=False), an_object(B, "b")]}, {}),
]
LLGUIDANCES: list[tuple[Any, Any]] = [
    ({"required": ["b"]}, {"b": 1}),
    (an_object(A, "b"), {"a": 1, "b": None}),
    (an_object(A, additionalProperties=TEXT), {"a": 1, "b": "x"}),
    ({"type": "object", "patternProperties": {"^a": INT}}, {"a": 1, "b": "x"}),
    ({"allOf": [an_object(A, "a"), an_object(B, "b")]}, {"a": 1, "b": "x"}),
    (
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": an_object(A, "a"), "b": an_object(B, "b")},
        },
        {"a": 1, "b": "x"},
    ),
    (an_object(A | B, anyOf=[{"required": ["a"]}, {"required": ["b"]}]), {"b": "x"}),
    ({"$ref": "#/$defs/n", "minimum": 5, "maximum": 6, "$defs": {"n": INT}}, 6),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#m"}, "m": {"$anchor": "m", **INT}}}, 6),
    ({"$ref": "n", "$id": "http://h/s", "$defs": {"n": {"$id": "n", **INT}}}, 6),
    ({"$ref": "#/x/n", "x": {"n": {"required": ["a"], "type": "object"}}}, {"a": 1}),
    ({"type": "integer", "enum": [1, 2, "a"]}, 2),
    ({"enum": ["a", "abc"], "minLength": 2}, "abc"),
    ({"minimum": 3}, 4),
    ({"type": "number", "minimum": 0.12345671, "maximum": 0.123456789}, 0.12345672),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.25}, 0.25),
    ({"type": "string", "pattern": "^[^a]{1,2}$"}, 'b"'),
    ({"type": "string", "pattern": "^[0-9-]+$", "format": "date"}, "2020-01-31"),
    ({"type": "string", "minLength": 2, "maxLength": 3}, "é\n"),
    *(
        ({"type": "string", "format": name}, text)
        for name, text in (
            ("date", "2020-01-31"), ("ipv4", "127.0.0.1"), ("ipv6", "::1"), ("email", "a@b.c"),
            ("uuid", "123e4567-e89b-12d3-a456-426614174000"),
        )
    ),
    ({"type": "string", "format": "email", "pattern": ZOD_EMAIL}, "a.b'c@d.ef"),
    (an_object({"a": {"minLength": 1}, "n": {**INT, "maximum": 2**63 - 1}}, "n"), {"n": 2**53}),
    (an_object({"a": {"minLength": 1}}, "a", minProperties=2), {"a": "x", "b": 1}),
    ({"type": "array", "minItems": 2}, [1, "a"]),
    ({"oneOf": [an_object({"k": {"enum": [n]}}, "k", nullable=True) for n in (1, 2)]}, {"k": 2}),
    (
        {"oneOf": [an_object({"a": {"minLength": 1, **TEXT}}, "a"), an_object(B, "b")]},
        {"a": "x"},
    ),
    ({"oneOf": [INT, {"minimum": 1, "type": ["string", "null"]}], "anyOf": [INT, TEXT]}, 7),
]  # fmt: skip
# A schema, and what the refusal names.
REFUSED: list[tuple[Any, str]] = [
    (an_object(A, "b", additionalProperties=False), "'b'"),
    ({"type": "string", "const": 1}, "incompatible types"),
    ({"type": []}, "`type` is empty, at #"),
    ({"properties": {"x": {"anyOf": []}}}, "`anyOf` is empty, at #/properties/x"),
    ({"oneOf": []}, "`oneOf` is empty"),
    ({"items": {"enum": []}}, "`enum` is empty, at #/items"),
    ({"type": "teapot"}, "`type` 'teapot' is not known, at #"),
    ({"properties": [1]}, "`properties` is not an object"),
    ({"items": 5}, "`items` is not a schema"),
    ({"$ref": "#/nowhere"}, "nowhere"),
    ({"$dynamicRef": "#n", "$defs": {"n": {"$dynamicAnchor": "n", **INT}}}, "`$dynamicRef`"),
    ({"anyOf": [INT, {"not": INT}]}, "`not` is not supported, at #/anyOf/1"),
    ({"type": "array", "contains": INT}, "`contains`"),
    ({"type": "array", "uniqueItems": True}, "`uniqueItems`"),
    ({"if": INT, "then": {"minimum": 3}}, "`if`"),
    (an_object(A | B, dependentRequired={"a": ["b"]}), "`dependentRequired`"),
    (an_object(A, unevaluatedProperties=TEXT), "`unevaluatedProperties`"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "`propertyNames`"),
    ({"type": "object", "additionalProperties": INT, "minProperties": 2}, "`minProperties`"),
    ({"type": "array", "prefixItems": [INT], "additionalItems": False}, "`additionalItems`"),
    ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, "`exclusiveMinimum`"),
    ({"const": 9007199254740993, "title": "t", "x-y": 1}, "`const`"),
    ({"type": "string", "format": "iri"}, "`format` 'iri'"),
    ({"type": "string", "pattern": "^(?!a)"}, "look-ahead"),
    ({"oneOf": [INT, {"type": "number"}]}, "`oneOf`"),
    ({"oneOf": [INT, {"type": "number"}], "discriminator": {"propertyName": "k"}}, "`oneOf`"),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0, 3]}]}, "`oneOf`"),
    (
        {"oneOf": [an_object({"k": {"const": "a"}}), an_object({"k": {"const": "b"}}, "k")]},
        "`oneOf`",
    ),
    # The first choice takes what is no object, and so do both.
    ({"oneOf": [{"properties": A}, TEXT]}, "`oneOf`"),
    ({"oneOf": [an_object(A), an_object(B, "b")]}, "`oneOf`"),
    ({"oneOf": [an_object(A, "a"), an_object(A | B, "b")]}, "`oneOf`"),
    ({"oneOf": [an_object(A, "a"), an_object(B, "b")], "allOf": [INT, INT]}, "`oneOf`"),
    ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "`uniqueItems`"),
    (json.loads('{"const": ' + "[" * 400 + "]" * 400 + ', "minLength": 1}'), "recursion"),
]

NUMBERS = [-7, -0.5, 0, 0.25, 0.5, 1, 1.0, 1.25, 2, 3, 5, 6, 20]
TEXTS = ["", "a", "b", "ab", "abc", "abcd", "x\ny", '"', "é", "2020-02-31", "127.0.0.01"]
OBJECTS = [
    {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"b": "x"}, {"a": 1, "b": "x"}, {"a": 1, "b": 1},
    {"a": "x", "b": "x"}, {"a": 1, "c": 1}, {"c": None}, {"a": {"a": "x"}}, {"k": 1}, {"k": "a"},
]  # fmt: skip
LISTS = [[], [1], ["a"], [1, 1], [1, "a"], ["a", 1], [1, "a", None], [{}], [[1]], [{"a": "x"}]]
DOCUMENTS = [
    *map(json.dumps, [None, True, False, *NUMBERS, *TEXTS, *OBJECTS, *LISTS]),
    '{"a": 1, "a": "x"}', r'{"\u0061": "x"}', r'{"a": 1, "\u0061": "x"}', '{"b": 1, "b": 1}',
    '"a\nb"', '"""', "-0", "0.0", "1.",
]  # fmt: skip


def is_valid(schema: Any, text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return jsonschema.Draft202012Validator(schema, format_checker=FORMATS).is_valid(value)


def outputs(data: bytes) -> Iterator[str]:
    """Outputs that end: of walks, and documents."""
    for seed in range(8):
        text = wander(data, seed, most=120, hurry=0.6)
        if text:
            yield text
    yield from (text for text in DOCUMENTS if fits(data, text))


def check(schema: Any, sample: Any, data: bytes) -> None:
    found = list(outputs(data))
    assert [text for text in found if not is_valid(schema, text)] == []
    texts = [json.dumps(sample, ensure_ascii=False), json.dumps(sample, separators=(",", ":"))]
    assert any(fits(data, text) for text in texts)


TABLE = [
    *((XGRAMMAR, *row) for row in XGRAMMARS),
    *((LLGUIDANCE, *row) for row in LLGUIDANCES),
]


@pytest.mark.parametrize(("library", "schema", "sample"), TABLE)
def test_every_output_is_a_valid_document(library: bytes, schema: Any, sample: Any) -> None:
    data = compiled("json_schema", json.dumps(schema))
    assert data[:1] == library
    check(schema, sample, data)


@pytest.mark.parametrize("model", SAMPLES)
def test_every_output_fits_a_model(model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    data = compiled("json_schema", json.dumps(schema))
    check(schema, SAMPLES[model], data)
    model.model_validate(next(text for text in outputs(data)) and SAMPLES[model])


@pytest.mark.parametrize("gap", [False, True], ids=["alone", "behind reasoning"])
@pytest.mark.parametrize(("schema", "words"), REFUSED)
def test_schema_that_nothing_keeps_to_is_refused_by_name(
    schema: Any, words: str, gap: bool
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled("json_schema", json.dumps(schema), gap=gap)
    assert words in str(caught.value)


def test_ruled_whitespace_changes_nothing_else() -> None:
    for schema, sample in (*XGRAMMARS[2:6], *LLGUIDANCES[1:6]):
        data = compile_grammar(
            "json_schema", json.dumps(schema), gap=False, folder=NANO, vocab_size=VOCAB,
            whitespace=FIXED_WHITESPACE,
        )  # fmt: skip
        check(schema, sample, data)


def test_objects_and_whitespace_are_the_same_from_both_libraries() -> None:
    plain, other = (an_object({"a": TEXT}), an_object({"a": {**TEXT, "minLength": 0}}))
    both = [compiled("json_schema", json.dumps(schema)) for schema in (plain, other)]
    assert [data[:1] for data in both] == [XGRAMMAR, LLGUIDANCE]
    for text, passes in (
        ('{"a":"x"}', True), ('{ "a"\n:\t"x" }', True), ('{"a":"x","b":1}', False),
        ('{"a":' + " " * 32 + '"x"}', True), ('{"a":' + " " * 33 + '"x"}', False),
    ):  # fmt: skip
        assert [fits(data, text) for data in both] == [passes] * 2, text
