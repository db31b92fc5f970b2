"""Behaviour of the DeepSeek parser beyond the shared cases."""

from __future__ import annotations

import json

import pytest

from services.tokenizer.parsing.dsml import MARK
from services.tokenizer.parsing.schema import ToolTable
from tests.tokenizer.support import Result, cut_pieces, every_cut, make_parser, parse


def block(*calls: str, word: str = "tool_calls") -> str:
    return "\n".join([f"<{MARK}{word}>", *calls, f"</{MARK}{word}>"])


def call(*parameters: str, name: str = "f") -> str:
    return "\n".join([f'<{MARK}invoke name="{name}">', *parameters, f"</{MARK}invoke>"])


def value(key: str, text: str, string: str = ' string="true"') -> str:
    return f'<{MARK}parameter name="{key}"{string}>{text}</{MARK}parameter>'


def parsed(text: str, finish: str = "stop", **options: object) -> Result:
    return every_cut("</think>" + text, finish, family="dsv4", **options)  # type: ignore[arg-type]


def arguments(text: str, **options: object) -> str:
    result = parsed(block(text), **options)
    assert len(result.calls) == 1
    return result.calls[0][1]


def test_second_block_adds_calls_and_text_around_it_is_dropped() -> None:
    text = f"a\n\n{block(call(value('a', 'x')))}\nlost\n{block(call(name='now'))} lost"
    result = parsed(text)
    assert (result.content, result.calls) == ("a", [["f", '{"a": "x"}'], ["now", "{}"]])


def test_text_behind_a_block_without_calls_is_content() -> None:
    result = parsed(f"a{block()} b")
    assert (result.content, result.calls, result.finish) == ("a b", [], "stop")


@pytest.mark.parametrize(
    "tag",
    [
        f'<{MARK} invoke  name = "f" >',
        f"<{MARK}invoke name='f'>",
        f"<{MARK}invoke name=f>",
        f'<{MARK}invoke id="1" name="f">',
        f'<{MARK}\ninvoke\nname="f">',
    ],
)
def test_attributes_stand_in_any_spacing(tag: str) -> None:
    body = f'{tag}\n<{MARK}parameter string="true"   name="a">x</{MARK}parameter>\n</{MARK}invoke>'
    assert arguments(body) == '{"a": "x"}'


@pytest.mark.parametrize(
    ("key", "text", "string", "shown"),
    [
        ("zz", "5", "false", "5"),
        ("zz", "5", "true", '"5"'),
        ("zz", "[1, {}]", "false", "[1, {}]"),
        ("zz", "NaN", "false", '"NaN"'),
        ("zz", "1e400", "false", '"1e400"'),
        ("zz", '"quoted"', "false", '"quoted"'),
        ("a", '"quoted"', "false", '"quoted"'),
        ("a", "null", "false", '"null"'),
        ("a", "5", "true", '"5"'),
        ("n", "5.0", "false", "5"),
        ("n", "x", "false", '"x"'),
        ("n", "[1]", "false", "[1]"),
        ("o", "{'k': 1}", "false", '{"k": 1}'),
        ("u", "null", "true", "null"),
    ],
)
def test_types_follow_the_schema_then_the_markup(
    key: str, text: str, string: str, shown: str
) -> None:
    parameter = value(key, text, f' string="{string}"')
    assert arguments(call(parameter)) == f'{{"{key}": {shown}}}'


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ('{"a": "q", "n": 1.50}', '{"a": "q", "n": 1.50}'),
        ("{}", "{}"),
        ('{"arguments": {"a": "q"}}', '{"a": "q"}'),
        ('{"arguments": {"zz": 1}}', '{"arguments": {"zz": 1}}'),
        ('{"input": [1]}', '{"input": [1]}'),
        ("{broken", "{}"),
        ("text", "{}"),
        ('{"a": 1', "{}"),
        ('{"k": 1e400}', "{}"),
    ],
)
def test_body_that_is_one_object_is_taken(body: str, shown: str) -> None:
    assert arguments(call(body)) == shown


@pytest.mark.parametrize(
    ("parameters", "shown"),
    [
        ([("arguments", '{"a": "z"}')], '{"a": "z"}'),
        ([("input", '{"a": "z", "n": 2}')], '{"a": "z", "n": 2}'),
        ([("arguments", '{"zz": 1}')], '{"arguments": {"zz": 1}}'),
        ([("arguments", "[1]")], '{"arguments": [1]}'),
        ([("arguments", '{"a": "z"}'), ("n", "1")], '{"arguments": {"a": "z"}, "n": 1}'),
        ([("n", "1"), ("arguments", '{"a": "z"}')], '{"n": 1, "arguments": {"a": "z"}}'),
    ],
)
def test_wrapper_around_all_arguments_is_undone(
    parameters: list[tuple[str, str]], shown: str
) -> None:
    body = call(*(value(key, text, ' string="false"') for key, text in parameters))
    assert arguments(body) == shown


def test_declared_parameter_of_a_wrappers_name_is_no_wrapper() -> None:
    tools = ToolTable({"f": json.dumps({"properties": {"input": {"type": "object"}, "a": {}}})})
    body = call(value("input", '{"a": 1}', ' string="false"'))
    assert arguments(body, tools=tools) == '{"input": {"a": 1}}'


def test_markup_of_other_families_is_text_in_a_value() -> None:
    text = "<tool_call></think> <parameter=x></parameter> ｜ </invoke>\n"
    assert json.loads(arguments(call(value("a", text)))) == {"a": text}


def test_half_a_tag_in_content_is_dropped_and_prose_behind_it_kept() -> None:
    assert parsed(f"a <{MARK}").content == "a "
    assert parsed(f"a <{MARK}: the mark of DSML").content == "a : the mark of DSML"
    assert parsed(f"a {MARK} b").content.startswith("a ")
    assert MARK not in parsed(f"a {MARK} b").content


def test_long_tag_is_none() -> None:
    result = parsed(f"<{MARK}invoke {'x' * 5000}>")
    assert (result.calls, result.finish) == ([], "stop")


def test_strict_recovery_makes_no_call_of_broken_markup() -> None:
    good = call(value("a", "x"))
    for text in (good, block(good, word="toolcalls")):
        assert parsed(f"a{text}", strict=True).calls == []
    assert parsed(block(call('{"a": 1}')), strict=True).calls == [["f", "{}"]]
    assert parsed(block(good), strict=True).calls == [["f", '{"a": "x"}']]
    wrapped = call(value("arguments", '{"a": "z"}', ' string="false"'))
    assert arguments(wrapped, strict=True) == '{"arguments": {"a": "z"}}'


def test_call_without_its_block_is_given_out_when_it_is_complete() -> None:
    parser = make_parser("dsv4", thinking=False)
    seen = Result()
    for part in cut_pieces(call(value("a", "x")), 10**6, "dsv4"):
        assert not seen.calls
        (parser.special if part == MARK else parser.feed)(part)
        seen.add(parser.take())
    assert seen.calls == [["f", '{"a": "x"}']]


def test_markup_that_gives_no_call_is_counted() -> None:
    parser = make_parser("dsv4", thinking=False)
    for part in cut_pieces(f'<{MARK}invoke name="unknown"></{MARK}invoke>', 10**6, "dsv4"):
        (parser.special if part == MARK else parser.feed)(part)
    assert parser.refused == 1
    assert make_parser("dsv4").refused == 0


def test_block_that_the_prompt_opened_again_changes_nothing() -> None:
    inner = block(call(name="now"))
    assert parsed(f"<{MARK}tool_calls>\n{inner}").calls == [["now", "{}"]]


def test_broken_off_value_stays_open_and_others_are_dropped() -> None:
    start = f'<{MARK}tool_calls>\n<{MARK}invoke name="f">\n{value("a", "x")}\n'
    cut = f'{start}<{MARK}parameter name="n" string="false">1'
    assert parsed(cut, "length").calls == [["f", '{"a": "x"']]
    assert parsed(cut, "stop").calls == [["f", '{"a": "x", "n": 1}']]
    wrapper = f'<{MARK}tool_calls>\n<{MARK}invoke name="f">\n'
    wrapper += value("arguments", '{"a": 1}', ' string="false"')
    assert parsed(wrapper, "stop").calls == [["f", '{"a": 1}']]


def test_tool_call_markup_in_reasoning_ends_it() -> None:
    text = f"why\n{block(call(name='now'))}"
    result = parse(cut_pieces(text, 3, "dsv41"), family="dsv41")
    assert (result.reasoning, result.calls) == ("why", [["now", "{}"]])
