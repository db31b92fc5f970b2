"""Behaviour of the GLM parser beyond the shared cases."""

from __future__ import annotations

import json

import pytest

from tests.tokenizer.support import Result, every_cut, make_parser

CALL = "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>"


def parsed(text: str, finish: str = "stop", **options: object) -> Result:
    return every_cut("</think>" + text, finish, family="glm", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "The tag <tool_call> opens a call.",
        "a <tool_call>" + "long" * 100,
        'x <tool_call>{"name": "f", "arguments": {}}</tool_call>',
    ],
)
def test_prose_behind_an_opener_is_content(text: str) -> None:
    result = parsed(text)
    expected = text.replace("<tool_call>", "").replace("</tool_call>", "")
    assert result.content.replace(" ", "") == expected.replace(" ", "")
    assert (result.calls, result.finish) == ([], "stop")


def test_second_parameter_without_its_opener_is_found() -> None:
    text = CALL.replace("</tool_call>", "n</arg_key><arg_value>5</arg_value></tool_call>")
    assert parsed(text).calls == [["f", '{"a": "x", "n": 5}']]


def test_longest_declared_name_is_split_off() -> None:
    text = "<tool_call>getcity</arg_key><arg_value>x</arg_value></tool_call>"
    assert parsed(text).calls == [["get", '{"city": "x"}']]
    assert parsed(text, strict=True).calls[0][0] == "getcity"


def test_missing_key_closer_and_empty_value_are_accepted() -> None:
    text = "<tool_call>f<arg_key>a<arg_value>x</arg_value></tool_call>"
    assert parsed(text).calls == [["f", '{"a": "x"}']]
    text = "<tool_call>f<arg_key>a</arg_key></arg_value></tool_call>"
    assert parsed(text).calls == [["f", '{"a": ""}']]


def test_key_without_a_value_is_dropped() -> None:
    text = (
        "<tool_call>f<arg_key>a</arg_key><arg_key>n</arg_key><arg_value>1</arg_value></tool_call>"
    )
    assert parsed(text).calls == [["f", '{"n": 1}']]


def test_call_closer_in_an_open_value_ends_the_call_when_generation_stops() -> None:
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>"
    assert parsed(text).calls == [["f", '{"a": "x"}']]
    assert parsed(text + " bye").content == " bye"
    assert parsed(text + CALL).calls == [["f", '{"a": "x"}'], ["f", '{"a": "x"}']]


def test_far_closer_shows_that_a_call_closer_was_literal() -> None:
    value = "x</tool_call>" + "y" * 5000 + "<arg_key>"
    text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    assert json.loads(parsed(text).calls[0][1]) == {"a": value}


def test_name_is_given_out_whole_with_the_first_key() -> None:
    parser = make_parser("glm", thinking=False)
    seen = Result()
    parser.special("<tool_call>")
    for part in ("get", "_", "weather"):
        parser.feed(part)
        seen.add(parser.take())
        assert not seen.calls
    parser.special("<arg_key>")
    seen.add(parser.take())
    assert seen.calls == [["get_weather", ""]]


def test_call_cut_behind_its_name_has_no_arguments() -> None:
    text = "<tool_call>f<arg_key>a"
    assert parsed(text, "length").calls == [["f", ""]]
    assert parsed(text, "stop").calls == [["f", "{}"]]


def test_newlines_between_the_tags_are_no_text() -> None:
    text = CALL.replace("><", ">\n<").replace("f\n", "f ") + "\n" + CALL
    result = parsed(text)
    assert (result.content, result.calls) == ("", [["f", '{"a": "x"}']] * 2)
