"""Grammars in the tokens of the nano checkpoint: what may follow, and what a hostile one costs."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator

import jsonschema
import numpy as np
import pytest
import pytest_asyncio
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.engine_pb2 import Grammar, ToolCallGrammar
from warhorse.v1.tokenizer_pb2 import (
    TOOL_CHOICE_AUTO,
    TOOL_CHOICE_NAMED,
    TOOL_CHOICE_REQUIRED,
    Tool,
)

from services.common.cli.up import DEFAULT_MODEL as NANO
from services.common.errors import ServiceError
from services.engine.grammar.compiled import Mask
from services.engine.grammar.errors import GrammarError
from services.engine.grammar.service import GrammarCompiler
from services.engine.sampling.grammar import GrammarState, allowed
from tests.engine.grammar.support import END, TOKENIZER, VOCAB, compiled, fits, state, wander

HOSTILE = "(" * 9 + "a" + "{1,999})" * 9  # takes seconds to compile
THINK_END = TOKENIZER.token_to_id("</think>")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = Tool(
    name="get_weather",
    parameters_json=json.dumps(
        {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}},
            "required": ["city"],
        }
    ),
)


@pytest.mark.parametrize("seed", range(12))
def test_any_walk_through_a_schema_is_a_valid_document(seed: int) -> None:
    text = wander(compiled("json_schema", json.dumps(PERSON)), seed)
    if text:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("form", "value", "pattern"),
    [
        ("regex", "[a-c]{2}-[0-9]{1,3}", "[a-c]{2}-[0-9]{1,3}"),
        ("ebnf", 'root ::= "yes" | "no" | "may" "be"', "yes|no|maybe"),
        (
            "structural_tag",
            '{"type":"structural_tag","format":{"type":"const_string","value":"ab"}}',
            "ab",
        ),
    ],
)
def test_walks_match_the_other_forms(form: str, value: str, pattern: str) -> None:
    for seed in range(8):
        assert re.fullmatch(pattern, wander(compiled(form, value), seed))


def test_json_object_gives_an_object() -> None:
    found = [wander(compiled("json_object", True), seed) for seed in range(12)]
    ended = [text for text in found if text]
    assert ended and all(isinstance(json.loads(text), dict) for text in ended)


def test_schema_that_the_first_library_refuses_goes_to_the_second() -> None:
    schema = {"type": "integer", "multipleOf": 7, "minimum": 70, "maximum": 90}
    data = compiled("json_schema", json.dumps(schema), gap=False)
    found = {wander(data, seed) for seed in range(20)}
    assert found == {"70", "77", "84"}
    for pattern in (r"(?i)ab", r"\p{Lu}{2}"):
        text = wander(compiled("regex", pattern), 1)
        assert len(text) == 2 and text.upper() == text if "p{" in pattern else text.lower() == "ab"


def test_reasoning_is_free_until_its_end_wherever_that_falls_in_a_step() -> None:
    data = compiled("json_object", True, gap=True)
    thinking = TOKENIZER.encode("Well. ").ids
    brace, word = TOKENIZER.token_to_id("{"), thinking[0]
    grammar = state(data, THINK_END, thinking)
    masks = grammar.masks([word, THINK_END, brace, word])
    assert masks[0] is None and masks[1] is None
    assert masks[2] is not None and masks[3] is not None
    assert allowed(masks[2], VOCAB)[brace] and not allowed(masks[2], VOCAB)[word]
    # Nothing of the drafts was kept.
    assert grammar.masks(()) == [None]
    grammar.advance([THINK_END])
    (mask,) = grammar.masks(())
    assert mask is not None and allowed(mask, VOCAB)[brace]
    assert not allowed(mask, VOCAB)[word]


DOCUMENTS = ('{"a":1}', '{"a": 1}', '{ "a": 1}', '{"a": 1, "b": [1, 2]}', '{"a":\n1,"b":[1,2]}')
ANY = '{"type":"object"}'
# Which of the documents a grammar lets pass.
WHITESPACE = [
    (Grammar(json_schema=ANY), "yyyyy"),
    (Grammar(json_schema=ANY, fixed_whitespace=True), "nynyn"),
    (Grammar(json_schema=ANY, whitespace_pattern="[ ]?"), "yyyyn"),
    (Grammar(json_schema=ANY, whitespace_pattern=""), "ynnnn"),
    (Grammar(json_object=True, fixed_whitespace=True), "nynyn"),
    (Grammar(json_schema="true", fixed_whitespace=True), "nynyn"),
]


@pytest.mark.parametrize(("grammar", "passes"), WHITESPACE)
@pytest.mark.asyncio(loop_scope="module")
async def test_whitespace_between_parts_of_json_is_ruled(
    compiler: GrammarCompiler, grammar: Grammar, passes: str
) -> None:
    await compiler.complete(grammar)
    assert "".join("ny"[fits(grammar.compiled, text)] for text in DOCUMENTS) == passes


CHILD = '{"type": "object", "properties": {"child": {"$ref": "#"}}, "required": ["child"]}'
ENDLESS = [
    ("json_schema", '{"$ref": "#"}'),
    ("json_schema", '{"anyOf": [{"$ref": "#"}]}'),
    ("json_schema", '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}'),
    ("json_schema", CHILD),
    ("json_schema", "false"),
    ("regex", r"[^\s\S]"),
    ("ebnf", "root ::= root"),
]


@pytest.mark.parametrize("gap", [False, True], ids=["alone", "behind reasoning"])
@pytest.mark.parametrize(("form", "value"), ENDLESS)
def test_grammar_of_nothing_is_refused(form: str, value: str, gap: bool) -> None:
    with pytest.raises(GrammarError, match="allows no output"):
        compiled(form, value, gap=gap)


NOTHING = {"nothing": {"$ref": "#/$defs/nothing"}}
DEAD_ENDS = [
    ("ebnf", 'root ::= "a" nothing\nnothing ::= nothing', "a"),
    (
        "json_schema",
        json.dumps({"properties": {"a": NOTHING["nothing"]}, "$defs": NOTHING}),
        '{"a":',
    ),
]


@pytest.mark.parametrize(("form", "value", "text"), DEAD_ENDS)
def test_an_output_ends_where_nothing_can_follow(form: str, value: str, text: str) -> None:
    """The end is allowed there, and rolled back."""
    place = state(compiled(form, value))
    place.advance(TOKENIZER.encode(text, add_special_tokens=False).ids)
    before = allowed(first(place), VOCAB)
    assert np.flatnonzero(before).tolist() == [END]
    assert place.masks([END])[1] is None
    assert np.array_equal(allowed(first(place), VOCAB), before)
    place.advance([END])
    assert place.masks([]) == [None]


def first(place: GrammarState) -> Mask:
    (mask,) = place.masks([])
    assert mask is not None
    return mask


@pytest.mark.parametrize("form", ["json_schema", "regex"])
def test_masks_after_drafts_equal_those_of_single_steps(form: str) -> None:
    value = json.dumps(PERSON) if form == "json_schema" else "[a-z]{1,4}[0-9]+"
    data = compiled(form, value)
    text = '{"name":"ab","age":3}' if form == "json_schema" else "abc42"
    ids = [*TOKENIZER.encode(text).ids, END]
    together = state(data).masks(ids)
    alone = state(data)
    for token, mask in zip(ids, together, strict=False):
        (expected,) = alone.masks(())
        assert expected is not None and mask is not None
        assert np.array_equal(expected, mask)
        alone.advance([token])
    assert together[-1] is None and alone.masks(()) == [None]


def test_forbidden_draft_leaves_the_place_unchanged() -> None:
    grammar = state(compiled("regex", "abc"))
    before = grammar.masks(())[0]
    masks = grammar.masks([TOKENIZER.token_to_id("{"), END])
    assert len(masks) == 3 and masks[1] is None and masks[2] is None
    after = grammar.masks(())[0]
    assert before is not None and after is not None and np.array_equal(before, after)
    with pytest.raises(ValueError, match="does not fit"):
        grammar.advance([TOKENIZER.token_to_id("{")])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler() -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(NANO, VOCAB)
    yield made
    await made.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_tool_calls_have_declared_names_and_valid_arguments(
    compiler: GrammarCompiler,
) -> None:
    for choice in (TOOL_CHOICE_REQUIRED, TOOL_CHOICE_NAMED):
        calls = ToolCallGrammar(
            parser="qwen3_xml", tools=[WEATHER], choice=choice, tool_name="get_weather"
        )
        grammar = Grammar(tool_calls=calls)
        await compiler.complete(grammar)
        text = next(t for seed in range(20) if (t := wander(grammar.compiled, seed)))
        pattern = (
            r"(?s)<tool_call>\n<function=get_weather>\s*<parameter=city>.*</parameter>\s*"
            r"</function>\n</tool_call>.*"
        )
        assert re.fullmatch(pattern, text), text


@pytest.mark.asyncio(loop_scope="module")
async def test_auto_leaves_text_free_and_calls_right(compiler: GrammarCompiler) -> None:
    calls = ToolCallGrammar(parser="qwen3_xml", tools=[WEATHER], choice=TOOL_CHOICE_AUTO)
    grammar = Grammar(tool_calls=calls)
    await compiler.complete(grammar)
    follow = state(grammar.compiled)
    (mask,) = follow.masks(())
    assert mask is not None and allowed(mask, VOCAB)[END]
    follow.advance(TOKENIZER.encode("Hello").ids)
    follow.advance(TOKENIZER.encode("<tool_call>\n<function=").ids)
    (mask,) = follow.masks(())
    assert mask is not None
    names = {TOKENIZER.id_to_token(i) for i in np.flatnonzero(allowed(mask, VOCAB)).tolist()}
    assert names and all("get_weather".startswith(n) for n in names)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar(), "no form"),
        (Grammar(json_schema="{"), "not JSON"),
        (Grammar(json_schema='{"type": "teapot"}'), "teapot"),
        (Grammar(json_schema='{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar(json_schema='{"$ref": "#/nowhere"}'), "grammar"),
        (Grammar(json_schema="[" * 100_000), "not JSON"),
        (Grammar(json_schema='{"type":"string","description":"' + "x" * 300_000 + '"}'), "bytes"),
        (Grammar(regex="(a"), "grammar"),
        (Grammar(regex="a", fixed_whitespace=True), "JSON alone"),
        (Grammar(json_object=True, whitespace_pattern="("), "regex parse error"),
        (Grammar(json_object=True, whitespace_pattern="", fixed_whitespace=True), "each other"),
        (Grammar(ebnf="root ::= nothing"), "grammar"),
        (Grammar(structural_tag='{"format": 5}'), "format"),
        (Grammar(tool_calls=ToolCallGrammar(parser="none", choice=TOOL_CHOICE_AUTO)), "none"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_grammar_that_cannot_be_used_is_refused(
    compiler: GrammarCompiler, grammar: Grammar, words: str
) -> None:
    with pytest.raises(ServiceError) as caught:
        await compiler.complete(grammar)
    assert caught.value.reason == ErrorReason.ERROR_REASON_INVALID_FIELD
    assert caught.value.field == "grammar" and words in caught.value.message


@pytest.mark.asyncio(loop_scope="module")
async def test_hostile_grammars_are_ended_and_others_go_on(compiler: GrammarCompiler) -> None:
    await compiler.complete(Grammar(regex="warm"))
    level = '{"anyOf":[{"type":"object","required":["a"],"properties":{"a":'
    deep = level * 3000 + "{}" + "}}]}" * 3000
    hostile = [
        Grammar(regex=f"{HOSTILE}b"),
        Grammar(json_schema=deep),
        Grammar(ebnf="root ::= " + " ".join(f'("a" | r{i})?' for i in range(3000))),
    ]
    for grammar in hostile:
        started = time.monotonic()
        try:
            await compiler.complete(grammar)
        except ServiceError as error:
            assert error.field == "grammar"
        assert time.monotonic() - started < 10
        good = Grammar(regex=f"ok{started}".replace(".", "x"))
        await compiler.complete(good)
        assert good.compiled


async def complete(compiler: GrammarCompiler, grammar: Grammar) -> str:
    """What is wrong with the grammar; empty when it is compiled."""
    try:
        await compiler.complete(grammar)
    except ServiceError as error:
        return error.message
    return ""


@pytest.mark.asyncio(loop_scope="module")
async def test_no_grammar_waits_for_the_second_attempt_at_a_hostile_one(
    compiler: GrammarCompiler,
) -> None:
    hostile = [
        asyncio.create_task(complete(compiler, Grammar(regex=f"({HOSTILE}){{1,{n}}}")))
        for n in range(900, 905)
    ]
    await asyncio.sleep(0)
    good = [complete(compiler, Grammar(regex=f"fine{n}")) for n in range(4)]
    assert await asyncio.gather(*good) == [""] * 4
    # Second attempts take twice as long as first ones, and two may have begun before the good came.
    assert sum(task.done() for task in hostile) <= 2
    assert all("too much time" in problem for problem in await asyncio.gather(*hostile))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_grammar_that_many_ask_for_is_compiled_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    ask = compiler._workers.ask

    async def counted(request: bytes, rank: int = 0) -> bytes:
        asked.append(request)
        return await ask(request, rank)

    monkeypatch.setattr(compiler._workers, "ask", counted)
    same = [Grammar(regex="the same") for _ in range(50)]
    first = asyncio.create_task(complete(compiler, same[0]))
    await asyncio.sleep(0)
    first.cancel()  # the others do not depend on the one that came first
    assert await asyncio.gather(*(complete(compiler, g) for g in same[1:])) == [""] * 49
    assert len(asked) == 1
    assert len({g.compiled for g in same[1:]}) == 1
