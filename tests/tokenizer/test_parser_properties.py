"""Invariants of the parser over random streams: cut anywhere, broken off anywhere, noisy."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.tokenizer.parsing.calls import CallPolicy
from tests.tokenizer.support import STRUCTURAL, Result, make_parser, parse, pieces_of

PLAIN = st.text(st.sampled_from("ab <>/=\n\"\\'{}é字🐴_"), max_size=12)
TAGS = st.sampled_from(
    [
        *STRUCTURAL,
        *STRUCTURAL,
        "<function=f>",
        "<function=now>",
        "<function=",
        "<parameter=a>",
        "<parameter=n>",
        "<parameter=u>",
        "\n<parameter=a>\n",
        "</parameter>",
        "</function>",
        "\n</function>\n",
        "< / parameter >",
        "</func",
        "\n",
        "12",
        "null",
    ]
)
NOISE = st.lists(st.one_of(TAGS, TAGS, PLAIN), max_size=24)
FINISH = st.sampled_from(["stop", "length"])

WORDS = st.text(st.sampled_from("ab .,é字🐴\n"), min_size=1, max_size=20)
VALUES = st.text(st.sampled_from('ab <>/"\\\n\té字🐴{}[]'), max_size=30)


def cut(parts: list[str], cuts: list[int]) -> list[str]:
    """Text parts cut again at given lengths; special tokens stay whole."""
    out: list[str] = []
    turn = 0
    for part in parts:
        if part in STRUCTURAL:
            out.append(part)
            continue
        while part:
            size = cuts[turn % len(cuts)]
            turn += 1
            out.append(part[:size])
            part = part[size:]
    return out


def without_ids(result: Result) -> Result:
    result.ids.clear()
    return result


@settings(max_examples=400, deadline=None)
@given(
    parts=NOISE,
    finish=FINISH,
    thinking=st.booleans(),
    emit=st.booleans(),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_output_does_not_depend_on_the_cut(
    parts: list[str], finish: str, thinking: bool, emit: bool, cuts: list[int]
) -> None:
    policy = CallPolicy(emit=emit)
    whole = without_ids(parse(parts, finish, thinking=thinking, policy=policy))
    again = without_ids(parse(cut(parts, cuts), finish, thinking=thinking, policy=policy))
    assert again == whole
    text = "".join(parts)
    whole_text = without_ids(parse([text], finish, thinking=thinking, policy=policy, by_id=False))
    pieces = cut([text], cuts)
    again = without_ids(parse(pieces, finish, thinking=thinking, policy=policy, by_id=False))
    assert again == whole_text


@settings(max_examples=400, deadline=None)
@given(parts=NOISE, finish=FINISH, thinking=st.booleans())
@example(parts=["<tool_call>", "<function=", "<", "<tool_call>"], finish="stop", thinking=False)
def test_noise_never_breaks_the_contract(parts: list[str], finish: str, thinking: bool) -> None:
    result = parse(parts, finish, thinking=thinking)
    for marker in STRUCTURAL:
        assert marker not in result.content
        assert marker not in result.reasoning
        assert all(marker not in name for name, _ in result.calls)
    assert (result.finish == "tool_calls") == (bool(result.calls) and finish == "stop")
    if finish == "stop":
        for _, arguments in result.calls:
            assert isinstance(json.loads(arguments), dict)
    assert all(not set(name) & set("<>\n") and name.strip() for name, _ in result.calls)


@settings(max_examples=200, deadline=None)
@given(reasoning=WORDS, content=WORDS, values=st.lists(VALUES, max_size=4), chunk=st.integers(1, 7))
def test_nothing_is_lost_outside_of_structures(
    reasoning: str, content: str, values: list[str], chunk: int
) -> None:
    blocks = ""
    for value in values:
        blocks += f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n"
        blocks += "</function>\n</tool_call>\n"
    parts = pieces_of(f"{reasoning}</think>{content}{blocks}")
    result = parse(cut(parts, [chunk]))
    assert result.reasoning == reasoning.strip("\n")
    expected = content.lstrip("\n")
    assert result.content == (expected.rstrip("\n") if values else expected)
    assert [json.loads(arguments) for _, arguments in result.calls] == [{"a": v} for v in values]


@settings(max_examples=100, deadline=None)
@given(value=st.text(st.characters(exclude_categories=["Cs"]), max_size=60), size=st.integers(1, 5))
def test_any_text_survives_as_a_string_value(value: str, size: int) -> None:
    body = f"\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n"
    parts = cut(["<tool_call>", body, "</tool_call>"], [size])
    result = parse(parts, thinking=False)
    assert json.loads(result.calls[0][1]) == {"a": value}


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("abc é字🐴.,\n"), min_size=1, max_size=60))
def test_plain_text_is_given_out_at_once(text: str) -> None:
    parser = make_parser(thinking=False)
    seen = Result()
    for count, char in enumerate(text, start=1):
        parser.feed(char)
        seen.add(parser.take())
        assert seen.content == text[:count].rstrip("\n")


@settings(max_examples=100, deadline=None)
@given(value=VALUES)
def test_string_arguments_stream_while_they_are_generated(value: str) -> None:
    """What is held of a value is shorter than the longest marker that may end it."""
    parser = make_parser(thinking=False)
    parser.special("<tool_call>")
    parser.feed("\n<function=f>\n<parameter=a>\n")
    seen = Result()
    for count, char in enumerate(value, start=1):
        parser.feed(char)
        seen.add(parser.take())
        shown = json.loads(seen.calls[0][1] + '"}')["a"]
        assert value.startswith(shown)
        held = value[len(shown) : count]
        assert not held or held[0] in "\n<"
        assert len(held) <= len("\n</function>") + 64


@pytest.mark.parametrize(
    "unit",
    ["<", "\n", "<parameter=", "</function>\n", "a</tool_call", "\n<parameter=a", " ", "</", "x"],
)
@pytest.mark.parametrize("where", ["content", "value", "number", "block", "name"])
def test_work_is_linear_in_the_length(unit: str, where: str) -> None:
    """Eight times the stream takes far less than 64 times the time (which quadratic work would)."""
    opening = {
        "content": "",
        "value": "\n<function=f>\n<parameter=a>\n",
        "number": "\n<function=f>\n<parameter=n>\n",
        "block": "\n",
        "name": "<function=",
    }[where]

    def seconds(count: int) -> float:
        parser = make_parser(thinking=False)
        if opening:
            parser.special("<tool_call>")
            parser.feed(opening)
        started = time.process_time()
        for _ in range(count):
            parser.feed(unit)
            parser.take()
        return time.process_time() - started

    seconds(100)
    long = min(seconds(16_000) for _ in range(2))
    assert long < 24 * max(seconds(2_000), 0.002)
