"""Invariants of all parsers over random streams: cut anywhere, broken off anywhere, noisy.

The numbers are those of I1 to I8: 1 output independent of the cut, 2 no markup in texts, 3 valid
JSON, 4 framing of calls (checked by `Result`), 5 nothing lost, 6 bounded hold-back, 7 linear work,
8 honest finish reasons.
"""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from services.tokenizer.parsing.calls import CallPolicy
from services.tokenizer.parsing.suspended import MAX_SUSPENDED
from services.tokenizer.parsing.tags import MAX_TAG_CHARS
from tests.tokenizer.streams import NOISE, flat_partition, partition, written
from tests.tokenizer.support import FORMATS, Result, make_parser, parse

# Together 20,000 examples and more.
NOISE_EXAMPLES = 5000
CLEAN_EXAMPLES = 1250
FAMILIES = tuple(NOISE)
ALL_FAMILIES = tuple(FORMATS)
QUICK = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}

PLAIN = st.text("ab <>/=\n\"\\'{}é字🐴_｜", max_size=8)
FINISH = st.sampled_from(["stop", "length"])
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=4)
WORDS = st.text("ab .,é字🐴\n", max_size=16)
VALUES = st.text('ab <>/"\\\n\té字🐴{}[]', max_size=24)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("f"), st.lists(st.tuples(st.just("a"), VALUES), max_size=2)),
        st.tuples(st.just("now"), st.just([])),
    ),
    max_size=3,
)


def noise(family: str) -> st.SearchStrategy[str]:
    pieces = st.sampled_from(NOISE[family])
    return st.lists(st.one_of(pieces, pieces, pieces, PLAIN), max_size=16).map("".join)


NOISES = {family: noise(family) for family in FAMILIES}


def without_ids(result: Result) -> Result:
    result.ids.clear()
    return result


def given_out(parts: list[str], family: str) -> Result:
    """What a stream has given out so far."""
    parser = make_parser(family)
    seen = Result()
    for part in parts:
        (parser.special if part in FORMATS[family].structural else parser.feed)(part)
        seen.add(parser.take())
    return seen


def check_contract(result: Result, family: str, finish: str) -> None:
    """2, 3 and 8 for the result of any stream whose markers came by id."""
    structural = FORMATS[family].structural
    for marker in structural:
        assert marker not in result.content
        assert marker not in result.reasoning
        assert all(marker not in name for name, _ in result.calls)
    assert all(name.strip() == name != "" and "\n" not in name for name, _ in result.calls)
    assert (result.finish == "tool_calls") == (bool(result.calls) and finish == "stop")
    if finish == "stop":
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in result.calls)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=NOISE_EXAMPLES, **QUICK)
@given(data=st.data(), finish=FINISH, flags=st.integers(0, 7), cuts=CUTS)
def test_noise_of_any_cut_keeps_the_contract(
    family: str, data: st.DataObject, finish: str, flags: int, cuts: list[int]
) -> None:
    """1, 2, 3, 4 and 8."""
    text = data.draw(NOISES[family])
    policy = CallPolicy(emit=bool(flags & 1))
    options = {"family": family, "thinking": bool(flags & 2), "policy": policy}
    options["strict"] = flags == 7
    whole = without_ids(parse(partition(text, family, [10**6]), finish, **options))
    check_contract(whole, family, finish)
    assert without_ids(parse(partition(text, family, cuts), finish, **options)) == whole
    options["by_id"] = False
    whole = without_ids(parse([text], finish, **options))
    assert without_ids(parse(flat_partition(text, cuts), finish, **options)) == whole


@pytest.mark.parametrize("family", ALL_FAMILIES)
@settings(max_examples=CLEAN_EXAMPLES, **QUICK)
@given(reasoning=WORDS, content=WORDS, calls=CALLS, cuts=CUTS, end=st.floats(0, 1))
def test_clean_stream_is_given_out_whole_and_in_order(
    family: str,
    reasoning: str,
    content: str,
    calls: list[tuple[str, list[tuple[str, str]]]],
    cuts: list[int],
    end: float,
) -> None:
    """1 and 5; and what a stream that is broken off has given out stands in the whole one."""
    text = f"{reasoning}</think>{content}{written(family, calls)}"
    result = parse(partition(text, family, cuts), family=family)
    assert result.reasoning == reasoning.strip("\n")
    expected = content.lstrip("\n")
    assert result.content == (expected.rstrip("\n") if calls else expected)
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == [
        (name, dict(values)) for name, values in calls
    ]
    pieces = partition(text, family, cuts)
    seen = given_out(pieces[: int(len(pieces) * end)], family)
    assert result.reasoning.startswith(seen.reasoning)
    assert result.content.startswith(seen.content)
    for (name, arguments), (whole_name, whole) in zip(seen.calls, result.calls, strict=False):
        assert name == whole_name and whole.startswith(arguments)


@pytest.mark.parametrize("family", ALL_FAMILIES)
@settings(max_examples=60, **QUICK)
@given(value=st.text(st.characters(exclude_categories=["Cs"]), max_size=60), size=st.integers(1, 5))
def test_any_text_survives_as_a_string_value(family: str, value: str, size: int) -> None:
    form = FORMATS[family]
    assume(not any(text in value for text in (*form.structural, *form.ends)))
    assume(family != "qwen" or "parameter" not in value)  # its closers are ordinary text
    text = written(family, [("f", [("a", value)])])
    result = parse(partition(text, family, [size]), family=family, thinking=False)
    assert json.loads(result.calls[0][1]) == {"a": value}


@settings(max_examples=100, **QUICK)
@given(text=st.text("abc é字🐴.,\n", min_size=1, max_size=60))
def test_plain_text_is_given_out_at_once(text: str) -> None:
    """6."""
    for family in ALL_FAMILIES:
        parser = make_parser(family, thinking=False)
        seen = Result()
        for count, char in enumerate(text, start=1):
            parser.feed(char)
            seen.add(parser.take())
            assert seen.content == text[:count].rstrip("\n")


OPEN_VALUE = {
    "dsv4": ["<", "｜DSML｜", "tool_calls>\n<", "｜DSML｜", 'invoke name="f">\n<', "｜DSML｜",
             'parameter name="a" string="true">'],
    "dsv41": ["<", "｜DSML｜", " calls>\n<", "｜DSML｜", ' invoke name="f">\n<', "｜DSML｜",
              ' parameter name="a" string="true">'],
    "glm": ["<tool_call>", "f", "<arg_key>", "a", "</arg_key>", "<arg_value>"],
    "qwen": ["<tool_call>", "\n<function=f>\n<parameter=a>\n"],
}  # fmt: skip


@settings(max_examples=60, **QUICK)
@given(value=VALUES)
def test_string_arguments_stream_while_they_are_generated(value: str) -> None:
    """6: what is held of a value is shorter than the longest marker that may end it."""
    for family in ALL_FAMILIES:
        parser = make_parser(family, thinking=False)
        for part in OPEN_VALUE[family]:
            (parser.special if part in FORMATS[family].structural else parser.feed)(part)
        seen = Result()
        for count, char in enumerate(value, start=1):
            parser.feed(char)
            seen.add(parser.take())
            shown = json.loads(seen.calls[0][1] + '"}')["a"]
            assert value.startswith(shown)
            held = value[len(shown) : count]
            assert not held or held[0] in "\n<"
            assert len(held) <= len("\n</function>") + 64


@settings(max_examples=100, **QUICK)
@given(data=st.data())
def test_what_is_held_is_bounded(data: st.DataObject) -> None:
    """6: after any noise, plain text comes out again within a bounded number of characters."""
    family = data.draw(st.sampled_from(FAMILIES))
    text = data.draw(NOISES[family])
    parser = make_parser(family, thinking=False)
    for piece in partition(text, family, [10**6]):
        (parser.special if piece in FORMATS[family].structural else parser.feed)(piece)
    parser.take()
    bound = MAX_SUSPENDED + MAX_TAG_CHARS + len(text)
    parser.feed("x" * bound)
    held = sum(len(str(part)) for part in vars(parser.machine).values() if isinstance(part, str))
    assert held <= len(text) + MAX_TAG_CHARS


UNITS = {
    "dsv4": ["<", "</", "\n", "a", '<{', "tool_calls>", '"'],
    "glm": ["<", "</tool_call", "\n", "a", "<arg_value", "</"],
    "qwen": ["<", "\n", "<parameter=", "</function>\n", "a</tool_call", "\n<parameter=a", " ", "</",
             "x"],
}  # fmt: skip
OPENINGS = {
    "dsv4": {
        "content": [],
        "value": OPEN_VALUE["dsv4"],
        "number": [*OPEN_VALUE["dsv4"][:-1], 'parameter name="n" string="false">'],
        "tag": OPEN_VALUE["dsv4"][:4],
        "body": OPEN_VALUE["dsv4"][:5],
        "behind": [*OPEN_VALUE["dsv4"], "</", "｜DSML｜", "tool_calls>"],
    },
    "glm": {
        "content": [],
        "value": OPEN_VALUE["glm"],
        "number": [*OPEN_VALUE["glm"][:3], "n", *OPEN_VALUE["glm"][4:]],
        "suspended": [*OPEN_VALUE["glm"], "</tool_call>"],
        "name": OPEN_VALUE["glm"][:1],
        "key": OPEN_VALUE["glm"][:3],
    },
    "qwen": {
        "content": [],
        "value": OPEN_VALUE["qwen"],
        "number": ["<tool_call>", "\n<function=f>\n<parameter=n>\n"],
        "block": ["<tool_call>", "\n"],
        "name": ["<tool_call>", "<function="],
    },
}
LINEAR = [
    (family, where, unit)
    for family, places in OPENINGS.items()
    for where in places
    for unit in UNITS[family]
]


@pytest.mark.parametrize(("family", "where", "unit"), LINEAR)
def test_work_is_linear_in_the_length(family: str, where: str, unit: str) -> None:
    """7: eight times the stream takes far less than 64 times the time of quadratic work."""

    def seconds(count: int) -> float:
        parser = make_parser(family, thinking=False)
        for part in OPENINGS[family][where]:
            (parser.special if part in FORMATS[family].structural else parser.feed)(part)
        started = time.process_time()
        for _ in range(count):
            parser.feed(unit)
            parser.take()
        return time.process_time() - started

    seconds(100)
    long = min(seconds(8_000) for _ in range(2))
    assert long < 24 * max(seconds(1_000), 0.002)
