"""Behaviour of the Qwen3.8 parser beyond the shared cases."""

from __future__ import annotations

import json

import pytest

from services.tokenizer.parsing.calls import CallPolicy
from services.tokenizer.parsing.deltas import Finish
from services.tokenizer.parsing.schema import ToolTable
from tests.tokenizer.support import Result, every_cut, make_parser, parse, pieces_of


def call(body: str, name: str = "f") -> str:
    return f"</think><tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def test_call_inside_reasoning_ends_it() -> None:
    result = every_cut("thoughts\n<tool_call>\n<function=f>\n</function>\n</tool_call>")
    assert (result.reasoning, result.calls) == ("thoughts", [["f", "{}"]])
    assert result.finish == "tool_calls"


def test_values_of_all_types_join_to_valid_json() -> None:
    tools = ToolTable(
        {
            "g": json.dumps(
                {
                    "properties": {
                        "n": {"type": "integer"},
                        "flag": {"type": "boolean"},
                        "s": {"type": "string"},
                    }
                }
            )
        }
    )
    long = 'word <b> & "quoted" \\ \t žluť 🐴\n' * 200
    body = parameter("n", "42") + parameter("flag", "true") + parameter("s", long)
    result = every_cut(call(body, "g"), tools=tools)
    assert json.loads(result.calls[0][1]) == {"n": 42, "flag": True, "s": long}


def test_call_without_arguments_before_one_with_arguments() -> None:
    text = call("", "now") + "\n<tool_call>\n<function=f>\n" + parameter("a", "x")
    result = every_cut(text + "</function>\n</tool_call>")
    assert result.calls == [["now", "{}"], ["f", '{"a": "x"}']]


def test_two_functions_in_one_block() -> None:
    body = parameter("a", "1") + "</function>\n<function=now>\n"
    assert every_cut(call(body)).calls == [["f", '{"a": "1"}'], ["now", "{}"]]


def test_missing_function_closer_is_repaired() -> None:
    text = f"</think><tool_call>\n<function=f>\n{parameter('a', 'x')}</tool_call>"
    assert every_cut(text).calls == [["f", '{"a": "x"}']]


def test_spaces_inside_tags_are_tolerated() -> None:
    text = "</think><tool_call>\n< function = f >\n< parameter = a >\nx\n< / parameter >\n"
    text += "< / function >\n</tool_call>"
    assert every_cut(text).calls == [["f", '{"a": "x"}']]


def test_literal_block_inside_a_value_is_kept() -> None:
    value = "<tool_call>x</tool_call> and </think>"
    result = every_cut(call(parameter("a", value)))
    assert result.calls == [["f", json.dumps({"a": value})]]


def test_literal_function_closer_inside_a_value_is_kept() -> None:
    value = "a </function> b\n</function>\n\nc"
    assert json.loads(every_cut(call(parameter("a", value))).calls[0][1]) == {"a": value}


def test_block_closer_in_an_open_value_ends_the_call_when_generation_stops() -> None:
    text = "</think><tool_call>\n<function=f>\n<parameter=a>\nx\n</tool_call>"
    result = every_cut(text)
    assert (result.calls, result.finish) == ([["f", '{"a": "x"}']], "tool_calls")


def test_text_behind_a_block_closer_in_an_open_value_is_content() -> None:
    text = "</think><tool_call>\n<function=f>\n<parameter=a>\nx\n</tool_call>\nbye"
    result = every_cut(text)
    assert (result.content, result.calls) == ("bye", [["f", '{"a": "x"}']])


def test_block_closer_followed_by_a_block_ends_an_open_value() -> None:
    first = "</think><tool_call>\n<function=f>\n<parameter=a>\nx\n</tool_call>\n"
    result = every_cut(first + "<tool_call>\n<function=now>\n</function>\n</tool_call>")
    assert result.calls == [["f", '{"a": "x"}'], ["now", "{}"]]


def test_far_closer_shows_that_a_block_closer_was_literal() -> None:
    value = "x</tool_call>" + "y" * 5000
    assert json.loads(every_cut(call(parameter("a", value))).calls[0][1]) == {"a": value}


def test_text_behind_a_literal_block_closer_streams_again() -> None:
    parser = make_parser(thinking=False)
    parser.special("<tool_call>")
    parser.feed("\n<function=f>\n<parameter=a>\nx")
    parser.special("</tool_call>")
    parser.feed("y" * 3000)
    result = Result()
    result.add(parser.take())
    assert result.calls[0][1] == '{"a": "x</tool_call>' + "y" * 3000


def test_bare_function_at_line_start_is_a_call() -> None:
    result = every_cut("</think>Sure.\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>")
    assert (result.content, result.calls) == ("Sure.", [["f", '{"a": "x"}']])


@pytest.mark.parametrize(
    "text",
    [
        "Use <function=f>\n<parameter=a> like so",
        "<function=unknown>\n<parameter=a>\nx",
        "<function=f>\nno parameter",
        "a\n<function=f",
    ],
)
def test_prose_about_functions_stays_text(text: str) -> None:
    result = every_cut("</think>" + text)
    assert (result.content, result.calls, result.finish) == (text, [], "stop")


def test_prose_behind_a_block_opener_is_content() -> None:
    result = every_cut("</think>The tag <tool_call> opens a block.")
    assert (result.content, result.calls) == ("The tag opens a block.", [])


def test_broken_markup_in_a_block_never_reaches_the_client() -> None:
    text = "</think>hi\n<tool_call>\n<funktion f>\n<parameter=a>\nx\n</parameter>\n</tool_call>"
    result = every_cut(text)
    assert (result.content, result.calls, result.finish) == ("hi", [], "stop")


def test_valid_call_behind_a_broken_one_is_kept() -> None:
    text = "</think><tool_call>\n<funktion f>\n</tool_call>" + call("", "now").removeprefix(
        "</think>"
    )
    assert every_cut(text).calls == [["now", "{}"]]


@pytest.mark.parametrize("broken", ["<function=\n", "<function= >", "<function=>"])
def test_function_without_a_name_is_no_call(broken: str) -> None:
    text = f"</think><tool_call>\n{broken}\n<parameter=a>\nx\n</parameter>\n"
    text += "</function>\n</tool_call>"
    result = every_cut(text)
    assert (result.content, result.calls, result.finish) == ("", [], "stop")


def test_key_with_markup_is_part_of_the_value() -> None:
    value = "x\n<parameter=b</parameter"
    assert json.loads(every_cut(call(parameter("a", value))).calls[0][1]) == {"a": value}


def test_repeated_key_is_written_again() -> None:
    body = parameter("a", "x") + parameter("a", "y")
    assert every_cut(call(body)).calls == [["f", '{"a": "x", "a": "y"}']]


def test_truncated_value_that_does_not_stream_is_dropped() -> None:
    text = "</think><tool_call>\n<function=f>\n" + parameter("a", "x") + "<parameter=n>\n12"
    assert every_cut(text, "length").calls == [["f", '{"a": "x"']]
    assert every_cut(text, "stop").calls == [["f", '{"a": "x", "n": 12}']]


def test_truncated_name_is_no_call() -> None:
    text = "</think><tool_call>\n<function=get_w"
    assert every_cut(text, "length").as_case()["calls"] == []
    assert every_cut(text, "length").finish == "length"


def test_complete_name_at_the_end_is_a_call() -> None:
    text = "</think><tool_call>\n<function=now>"
    assert every_cut(text, "stop").calls == [["now", "{}"]]
    assert every_cut(text, "length").calls == [["now", ""]]


def test_choice_none_removes_calls_from_content() -> None:
    text = "</think>hi\n\n" + call(parameter("a", "x")).removeprefix("</think>")
    result = every_cut(text, policy=CallPolicy(emit=False))
    assert (result.content, result.calls, result.finish) == ("hi", [], "stop")


def test_without_parallel_calls_the_first_is_kept() -> None:
    text = call(parameter("a", "x")) + call("", "now").removeprefix("</think>")
    result = every_cut(text, policy=CallPolicy(parallel=False))
    assert result.calls == [["f", '{"a": "x"}']]


def test_forced_tool_keeps_the_finish_reason() -> None:
    parser = make_parser(thinking=False)
    for piece in pieces_of(call("", "now").removeprefix("</think>")):
        (parser.special if piece.endswith("tool_call>") else parser.feed)(piece)
    assert parser.finish(Finish.STOP, named=True) is Finish.STOP


def test_stop_string_inside_a_call_leaves_it_open() -> None:
    parser = make_parser(thinking=False)
    parser.special("<tool_call>")
    parser.feed("\n<function=f>\n<parameter=a>\nabc")
    assert parser.finish(Finish.STOP, stop_string=True) is Finish.STOP
    result = Result()
    result.add(parser.take())
    assert result.calls == [["f", '{"a": "abc']]


def test_markers_spelled_with_ordinary_tokens_are_text() -> None:
    parser = make_parser()
    for part in ("r</thi", "nk>s <tool", "_call>"):
        parser.feed(part)
    parser.special("</think>")
    parser.feed("<tool_call>\n<think>")
    parser.finish(Finish.STOP)
    result = Result()
    result.add(parser.take())
    assert result.reasoning == "r</think>s <tool_call>"
    assert result.content == "<tool_call>\n<think>"


def test_model_that_opens_its_reasoning_itself() -> None:
    result = every_cut("<think>\nr\n</think>\n\nhello", thinking=False)
    assert (result.reasoning, result.content) == ("r", "hello")


def test_only_newlines_are_stripped() -> None:
    text = "\na \n</think>\n\n x \n\n" + call("").removeprefix("</think>")
    result = every_cut(text)
    assert (result.reasoning, result.content) == ("a ", " x ")


def test_whitespace_between_calls_is_dropped_and_text_between_them_kept() -> None:
    one = call("", "now").removeprefix("</think>")
    result = every_cut(f"</think>{one}\n \n{one} and {one} done")
    assert (result.content, len(result.calls)) == (" and  done", 3)


def test_newlines_inside_and_at_the_end_of_content_are_kept() -> None:
    assert every_cut("</think>a\n\nb\n\n").content == "a\n\nb\n\n"


def test_ids_derived_from_a_seed_are_stable_and_differ() -> None:
    text = pieces_of(call("", "now") + call("", "now").removeprefix("</think>"))
    first = parse(text, policy=CallPolicy(id_seed="s")).ids
    assert first == parse(text, policy=CallPolicy(id_seed="s")).ids
    assert len(set(first)) == 2 and set(first).isdisjoint(parse(text).ids)
