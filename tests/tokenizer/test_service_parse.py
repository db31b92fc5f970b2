"""Parsing by the running service, over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from warhorse.v1 import common_pb2, tokenizer_pb2

from services.tokenizer.wire import pack_ids
from tests.tokenizer.calls import (
    OPEN,
    Stub,
    encode,
    events,
    joined,
    refusal,
    tools,
)
from tests.tokenizer.support import vocabulary

OUTPUT = (
    "why\n</think>\n\nLook 🐴.\n\n<tool_call>\n<function=f>\n<parameter=a>\nx y\n</parameter>\n"
    "<parameter=n>\n5\n</parameter>\n</function>\n</tool_call><|im_end|>"
)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_parse_answers_each_message_in_order(stub: Stub, size: int) -> None:
    ids = encode(stub, OUTPUT)
    batches = [ids[i : i + size] for i in range(0, len(ids), size)]
    opening = tokenizer_pb2.ParseOpen(start_state=OPEN, tools=tools("f"), token_texts=True)
    answers = list(stub.Parse(events(opening, batches)))
    assert len(answers) == len(batches) + 1
    assert joined(answers) == {
        "reasoning": "why",
        "content": "Look 🐴.",
        "calls": {0: ["f", '{"a": "x y", "n": 5}']},
    }
    assert answers[-1].finish_reason == tokenizer_pb2.FINISH_REASON_TOOL_CALLS
    texts = b"".join(text for answer in answers for text in answer.token_bytes)
    assert texts.decode() == OUTPUT
    thinking = encode(stub, OUTPUT.split("</think>")[0])
    assert answers[-1].reasoning_tokens == len(thinking)


def test_parse_without_tools_removes_call_markup(stub: Stub) -> None:
    answers = list(
        stub.Parse(events(tokenizer_pb2.ParseOpen(start_state=OPEN), [encode(stub, OUTPUT)]))
    )
    assert joined(answers) == {"reasoning": "why", "content": "Look 🐴.", "calls": {}}
    assert answers[-1].finish_reason == tokenizer_pb2.FINISH_REASON_STOP


def test_parsers_can_be_switched_off(stub: Stub) -> None:
    opening = tokenizer_pb2.ParseOpen(
        start_state=OPEN, tools=tools("f"), tool_call_parser="none", reasoning_parser="none"
    )
    answers = list(stub.Parse(events(opening, [encode(stub, OUTPUT)])))
    assert joined(answers)["content"] == OUTPUT.removesuffix("<|im_end|>")


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_stop_string_ends_the_text_and_names_its_token(stub: Stub, size: int) -> None:
    ids = encode(stub, "r</think>one two three")
    batches = [ids[i : i + size] for i in range(0, len(ids), size)]
    opening = tokenizer_pb2.ParseOpen(start_state=OPEN, stop=["zzz", "wo t"])
    answers = list(stub.Parse(events(opening, batches)))
    assert joined(answers)["content"] == "one t"
    first = next(i for i, a in enumerate(answers) if a.HasField("stop_matched"))
    assert answers[first].stop_matched == 1
    used = sum(len(batch) for batch in batches[:first]) + answers[first].tokens_used
    decoded = vocabulary().decode(ids[:used], skip_special=False)
    assert "wo t" in decoded
    assert "wo t" not in vocabulary().decode(ids[: used - 1], skip_special=False)
    assert answers[-1].finish_reason == tokenizer_pb2.FINISH_REASON_STOP


def test_stop_string_is_searched_in_the_raw_output(stub: Stub) -> None:
    """Markers of the format are part of it, as they are of what the model writes."""
    ids = encode(stub, "thoughts</think>answer")
    opening = tokenizer_pb2.ParseOpen(start_state=OPEN, stop=["ts</think>a"])
    assert joined(stub.Parse(events(opening, [ids]))) == {
        "reasoning": "though",
        "content": "",
        "calls": {},
    }


def test_stop_string_can_be_part_of_the_text(stub: Stub) -> None:
    opening = tokenizer_pb2.ParseOpen(
        start_state=tokenizer_pb2.PARSE_STATE_TEXT, stop=["two"], include_stop_str_in_output=True
    )
    answers = stub.Parse(events(opening, [encode(stub, "one two three")]))
    assert joined(answers)["content"] == "one two"


def test_completion_text_is_verbatim(stub: Stub) -> None:
    text = "\n\n<think> a </think>\n\n<tool_call>"
    state = tokenizer_pb2.PARSE_STATE_TEXT
    ids = encode(stub, text + "<|object_ref_start|><|im_end|>")
    answers = stub.Parse(events(tokenizer_pb2.ParseOpen(start_state=state), [ids]))
    assert joined(answers)["content"] == text
    opening = tokenizer_pb2.ParseOpen(start_state=state, skip_special_tokens=False)
    answers = stub.Parse(events(opening, [ids]))
    assert joined(answers)["content"] == text + "<|object_ref_start|>"


def test_hidden_tokens_never_become_text(stub: Stub) -> None:
    ids = encode(stub, "one!")
    state = tokenizer_pb2.PARSE_STATE_TEXT
    opening = tokenizer_pb2.ParseOpen(start_state=state, hidden_token_ids=ids[-1:])
    assert joined(stub.Parse(events(opening, [ids])))["content"] == "one"


def test_character_cut_by_the_end_of_the_prompt(stub: Stub) -> None:
    byte_id = {data: i for i, data in enumerate(vocabulary().bytes_of) if len(data) == 1}
    ids = [byte_id[bytes([byte])] for byte in "字".encode()]
    opening = tokenizer_pb2.ParseOpen(
        start_state=tokenizer_pb2.PARSE_STATE_TEXT,
        prompt_tail=pack_ids([*vocabulary().encode("prompt text"), *ids[:2]]),
    )
    batches = [[ids[2]], vocabulary().encode("!")]
    answers = list(stub.Parse(events(opening, batches)))
    assert [a.deltas[0].content for a in answers[:2]] == ["字", "!"]


def test_newlines_at_the_start_of_continued_reasoning_are_text(stub: Stub) -> None:
    ids = encode(stub, "\nmore</think>x")
    for tail, reasoning in (("<think>\n", "more"), ("<think>\nso far", "\nmore")):
        opening = tokenizer_pb2.ParseOpen(
            start_state=OPEN, prompt_tail=pack_ids(encode(stub, tail))
        )
        assert joined(stub.Parse(events(opening, [ids])))["reasoning"] == reasoning


def test_length_is_reported_as_it_is(stub: Stub) -> None:
    ids = encode(stub, OUTPUT.split("</parameter>")[0])
    opening = tokenizer_pb2.ParseOpen(start_state=OPEN, tools=tools("f"))
    answers = list(stub.Parse(events(opening, [ids], tokenizer_pb2.FINISH_REASON_LENGTH)))
    assert answers[-1].finish_reason == tokenizer_pb2.FINISH_REASON_LENGTH
    assert joined(answers)["calls"] == {0: ["f", '{"a": "x y\\n']}


STOP, LENGTH, CALLS = (
    tokenizer_pb2.FINISH_REASON_STOP,
    tokenizer_pb2.FINISH_REASON_LENGTH,
    tokenizer_pb2.FINISH_REASON_TOOL_CALLS,
)


@pytest.mark.parametrize(
    ("choice", "engine", "finish"),
    [
        ("AUTO", STOP, CALLS),
        ("REQUIRED", STOP, CALLS),
        ("NAMED", STOP, STOP),
        ("NONE", STOP, STOP),
        *((choice, LENGTH, LENGTH) for choice in ("AUTO", "REQUIRED", "NAMED", "NONE")),
    ],
)
def test_finish_reason_of_an_output_with_a_call(
    stub: Stub, choice: str, engine: Any, finish: Any
) -> None:
    opening = tokenizer_pb2.ParseOpen(
        start_state=OPEN, tools=tools("f"), tool_choice=f"TOOL_CHOICE_{choice}"
    )
    answers = list(stub.Parse(events(opening, [encode(stub, OUTPUT)], engine)))
    assert answers[-1].finish_reason == finish
    assert bool(joined(answers)["calls"]) == (choice != "NONE")


@pytest.mark.parametrize(
    ("opening", "field_name"),
    [
        (tokenizer_pb2.ParseOpen(tool_call_parser="zzz"), "tool_call_parser"),
        (tokenizer_pb2.ParseOpen(reasoning_parser="zzz"), "reasoning_parser"),
        (tokenizer_pb2.ParseOpen(stop=[""]), "stop[0]"),
        (tokenizer_pb2.ParseOpen(prompt_tail=b"x"), "prompt_tail"),
        (tokenizer_pb2.ParseOpen(tools=[tokenizer_pb2.Tool(name="f", parameters_json="{")]),
         "tools[0].parameters_json"),
    ],
)  # fmt: skip
def test_malformed_opening_is_refused(
    stub: Stub, opening: tokenizer_pb2.ParseOpen, field_name: str
) -> None:
    error = refusal(lambda: list(stub.Parse(events(opening, []))))
    assert (error.reason, error.field) == (common_pb2.ERROR_REASON_INVALID_FIELD, field_name)


def test_tokens_before_the_opening_are_refused(stub: Stub) -> None:
    request = tokenizer_pb2.ParseRequest(tokens=tokenizer_pb2.ParseTokens(token_ids=[1]))
    error = refusal(lambda: list(stub.Parse(iter([request]))))
    assert error.field == "event"


def test_many_choices_over_one_call(stub: Stub) -> None:
    ids = encode(stub, OUTPUT)
    opening = tokenizer_pb2.ParseOpen(start_state=OPEN, tools=tools("f"))
    scripts = {
        choice: list(events(opening, [ids[i : i + size] for i in range(0, len(ids), size)]))
        for choice, size in ((7, 1), (8, 2), (9, 50))
    }
    bad = tokenizer_pb2.ParseRequest(open=tokenizer_pb2.ParseOpen(stop=[""]))
    scripts[10] = [bad]

    def requests() -> Iterator[tokenizer_pb2.ParseManyRequest]:
        dropped = tokenizer_pb2.ParseManyItem(choice=99, request=scripts[7][0])
        yield tokenizer_pb2.ParseManyRequest(
            items=[dropped, tokenizer_pb2.ParseManyItem(choice=99, drop=True)]
        )
        for turn in range(len(scripts[7])):
            items = [
                tokenizer_pb2.ParseManyItem(choice=choice, request=script[turn])
                for choice, script in scripts.items()
                if turn < len(script)
            ]
            yield tokenizer_pb2.ParseManyRequest(items=items)

    answers: dict[int, list[Any]] = {choice: [] for choice in scripts}
    for response in stub.ParseMany(requests()):
        for answer in response.answers:
            answers[answer.choice].append(answer)
    (failed,) = answers.pop(10)
    assert (failed.error, failed.error_field) == (common_pb2.ERROR_REASON_INVALID_FIELD, "stop[0]")
    for choice, given in answers.items():
        assert len(given) == len(scripts[choice]) - 1
        alone = joined(stub.Parse(iter(scripts[choice])))
        assert joined(answer.response for answer in given) == alone
        assert given[-1].response.finish_reason == tokenizer_pb2.FINISH_REASON_TOOL_CALLS
