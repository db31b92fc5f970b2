"""What reaches the engine of the fields that say what an output must look like."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest
from warhorse.v1 import common_pb2, engine_pb2, tokenizer_pb2

from services.common.errors import ServiceError
from tests.gateway.conftest import MakeStack, Stack
from tests.gateway.fakes import Reply, text_reply
from tests.gateway.test_bad_input import check_error

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}


@pytest.mark.parametrize(
    ("fields", "form", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"response_format": TAG}, "structural_tag", TAG),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", 'b"']}}, "ebnf", 'root ::= "a" | "b\\""'),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "ebnf", "root ::= x"),
        ({"structured_outputs": {"structural_tag": TAG}}, "structural_tag", TAG),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_regex": "b"}, "regex", "b"),
        ({"guided_choice": ["x"]}, "ebnf", 'root ::= "x"'),
        ({"guided_grammar": "root ::= y"}, "ebnf", "root ::= y"),
        ({"guided_json_object": True}, "json_object", True),
        ({"structural_tag": TAG}, "structural_tag", TAG),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"regex": "c"}, "regex", "c"),
        ({"ebnf": "root ::= z"}, "ebnf", "root ::= z"),
    ],
)
async def test_every_way_to_ask_for_a_form(
    stack: Stack, fields: dict[str, Any], form: str, value: Any
) -> None:
    assert (await stack.chat(**fields)).status_code == 200
    completion = await stack.http.post("/v1/completions", json={"prompt": "a", **fields})
    assert completion.status_code == 200
    if "response_format" not in fields:  # that is `text.format` there
        response = await stack.http.post("/v1/responses", json={"input": "a", **fields})
        assert response.status_code == 200, response.text
    for request in stack.engine.requests:
        assert request.grammar.WhichOneof("form") == form
        found = getattr(request.grammar, form)
        assert (json.loads(found) if isinstance(value, dict) else found) == value
        assert not request.grammar.HasField("after_token_id")


# What is asked for, and the two rules of the whitespace in the engine's request.
OPTIONS: list[tuple[dict[str, Any], bool, str | None]] = [
    ({"json": SCHEMA, "disable_any_whitespace": True}, True, None),
    ({"json_object": True, "disable_any_whitespace": True}, True, None),
    ({"json": SCHEMA, "whitespace_pattern": "[ ]?"}, False, "[ ]?"),
    ({"json": SCHEMA, "whitespace_pattern": ""}, False, ""),
    ({"json": SCHEMA, "disable_any_whitespace": False, "whitespace_pattern": None}, False, None),
    ({"regex": "a", "disable_any_whitespace": False}, False, None),
]


async def test_whitespace_options_reach_the_engine(stack: Stack) -> None:
    for options, fixed, pattern in OPTIONS:
        assert (await stack.chat(structured_outputs=options)).status_code == 200
        grammar = stack.engine.requests[-1].grammar
        found = grammar.whitespace_pattern if grammar.HasField("whitespace_pattern") else None
        assert (grammar.fixed_whitespace, found) == (fixed, pattern)


NESTED = {
    "properties": {"additionalProperties": {"type": "object"}, "open": {"type": "object"}},
    "$defs": {
        "d": {"patternProperties": {"^x": {"anyOf": [{"properties": {}}, {"type": "null"}]}}}
    },
    "enum": [{"type": "object"}],
    "items": [{"type": "object", "additionalProperties": {"type": "object"}}],
}
CLOSED = {
    "properties": {
        "additionalProperties": {"type": "object", "additionalProperties": False},
        "open": {"type": "object", "additionalProperties": False},
    },
    "$defs": {
        "d": {
            "patternProperties": {
                "^x": {
                    "anyOf": [{"properties": {}, "additionalProperties": False}, {"type": "null"}]
                }
            },
            "additionalProperties": False,
        }
    },
    "enum": [{"type": "object"}],
    "items": [
        {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": False},
        }
    ],
    "additionalProperties": False,
}
PARTS = {"type": "object", "allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}


async def test_objects_can_be_closed(stack: Stack) -> None:
    for schema, expected in ((NESTED, CLOSED), (PARTS, PARTS), (True, True)):
        for given in (schema, json.dumps(schema)):
            options = {"json": given, "disable_additional_properties": True}
            assert (await stack.chat(structured_outputs=options)).status_code == 200
            assert json.loads(stack.engine.requests[-1].grammar.json_schema) == expected


async def test_nothing_asked_is_no_grammar(stack: Stack) -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"tools": [TOOL]}):
        await stack.chat(**fields)
    assert not any(r.HasField("grammar") for r in stack.engine.requests)


async def test_grammar_begins_behind_the_reasoning(stack: Stack) -> None:
    stack.tokenizer.reasoning_end = 257
    form = {"response_format": {"type": "json_object"}}
    await stack.chat(**form, chat_template_kwargs={"enable_thinking": True})
    assert stack.engine.requests[0].grammar.after_token_id == 257


@pytest.mark.parametrize(
    ("choice", "expected", "name"),
    [
        ("required", tokenizer_pb2.TOOL_CHOICE_REQUIRED, ""),
        (
            {"type": "function", "function": {"name": "look"}},
            tokenizer_pb2.TOOL_CHOICE_NAMED,
            "look",
        ),
    ],
)
async def test_forced_calls(stack: Stack, choice: Any, expected: int, name: str) -> None:
    form = {"response_format": {"type": "json_object"}}
    answer = await stack.chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, **form)
    assert answer.status_code == 200
    calls = stack.engine.requests[0].grammar.tool_calls
    assert (calls.choice, calls.tool_name, calls.parallel) == (expected, name, False)
    assert [t.name for t in calls.tools] == ["look"]
    rendered = stack.tokenizer.renders[0]
    assert (rendered.tool_choice, rendered.tool_name) == (expected, name)
    assert stack.tokenizer.openings[0].tool_choice == expected


@pytest.mark.parametrize(
    ("level", "tool", "bound"),
    [
        ("auto", TOOL, False),
        ("auto", STRICT, True),
        ("function", TOOL, True),
        ("none", STRICT, False),
    ],
)
async def test_free_calls_follow_their_schemas_by_level(
    make_stack: MakeStack, level: str, tool: Any, bound: bool
) -> None:
    stack = await make_stack(tool_strict_level=level)
    await stack.chat(tools=[tool])
    (request,) = stack.engine.requests
    assert request.HasField("grammar") == bound
    if bound:
        assert request.grammar.tool_calls.choice == tokenizer_pb2.TOOL_CHOICE_AUTO


async def test_refused_grammar_is_named_by_the_field_that_asked_for_it(stack: Stack) -> None:
    reason = common_pb2.ERROR_REASON_INVALID_FIELD
    refusal = ServiceError(reason, "grammar: Invalid type: teapot", field="grammar")
    stack.engine.replies = [Reply([[]], error=refusal)]
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "teapot"}}}
    error = check_error(await stack.chat(response_format=schema), 400, "response_format")
    assert "teapot" in error["message"]
    check_error(await stack.chat(tools=[TOOL], tool_choice="required"), 400, "tools")


async def test_sdk_parses_into_a_model(stack: Stack) -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int

    stack.engine.replies = [text_reply('{"name": "Ann", "age": 7}')]
    completion = await stack.sdk.chat.completions.parse(
        model="fake-model",
        messages=[{"role": "user", "content": "Hi"}],
        response_format=Person,
    )
    assert completion.choices[0].message.parsed == Person(name="Ann", age=7)
    sent: engine_pb2.GenerateRequest = stack.engine.requests[0]
    assert set(json.loads(sent.grammar.json_schema)["required"]) == {"name", "age"}
