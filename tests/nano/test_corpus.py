"""Generated conversations: right answers, a clean split, and the text of the chat template."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from services.engine.checkpoints.nano.arithmetic import add_steps, subtract_steps
from services.engine.checkpoints.nano.config import MODEL_DIR, NanoConfig
from services.engine.checkpoints.nano.conversation import Conversation, Message, render
from services.engine.checkpoints.nano.corpus import conversations, held_out
from services.engine.checkpoints.nano.data import IDS, POS, START, TARGET, encode, pack
from services.engine.checkpoints.nano.evaluate import calls, is_right
from services.engine.checkpoints.nano.words import is_held_out

CFG = NanoConfig()


class TemplateError(Exception):
    """Raised by the template's raise_exception."""


@pytest.fixture(scope="module")
def template() -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def fail(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = fail
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((MODEL_DIR / "chat_template.jinja").read_text("utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def _text(conversation: Conversation) -> str:
    return "".join(piece.text for piece in render(conversation))


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_equal_seeds_give_equal_conversations() -> None:
    first, second = ([_text(c) for c in islice(conversations(5), 20)] for _ in range(2))
    assert first == second


def test_worked_steps_end_in_the_result() -> None:
    for a in range(0, 1000, 37):
        for b in range(0, 1000, 41):
            assert add_steps(a, b).endswith(f"o {a + b}.")
            assert subtract_steps(a, b).endswith(f"o {a - b}.")


def test_every_equation_of_the_working_holds() -> None:
    for a, b in ((99, 1), (505, 98), (1, 999), (700, 699), (0, 0)):
        for steps in (add_steps(a, b), subtract_steps(a, b)):
            for left, right in re.findall(r": ([\d +-]+) = (\d+)", steps):
                assert eval(left) == int(right)


def test_training_conversations_hold_no_held_out_sum() -> None:
    seen = 0
    for conversation in islice(conversations(11), 600):
        for message in conversation.messages:
            if message.role == "user" and (
                m := re.fullmatch(r"(\d+) ?([+-]) ?(\d+)", message.content)
            ):
                a, b = sorted((int(m[1]), int(m[3])))
                assert not is_held_out("arithmetic", m[2], a, b)
                seen += 1
    assert seen > 20


def test_no_held_out_prompt_occurs_in_training() -> None:
    trained = {m.content for c in islice(conversations(3), 3000) for m in c.messages}
    for task in ("arithmetic", "tools", "passages"):
        for conversation in islice(held_out(task, 1), 100):
            assert conversation.messages[0].content not in trained


def test_renderer_writes_what_the_template_writes(template: Any) -> None:
    for conversation in islice(conversations(21), 300):
        written = template.render(
            messages=conversation.openai_messages(),
            tools=conversation.tools or None,
            enable_thinking=conversation.thinking,
            reasoning_effort=conversation.effort,
        )
        assert written == _text(conversation)


def test_pieces_encode_like_the_whole_text(tokenizer: Tokenizer) -> None:
    for conversation in islice(conversations(22), 300):
        text = _text(conversation)
        ids = encode(conversation, tokenizer).ids.tolist()
        assert ids == tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        (
            {"enable_thinking": False},
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        (
            {"reasoning_effort": "low"},
            "<|im_start|>system\nThink briefly.<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
    ],
    ids=["default", "no_thinking", "low_effort"],
)
def test_generation_prompt(template: Any, arguments: dict[str, Any], expected: str) -> None:
    written = template.render(messages=_user(" Hi "), add_generation_prompt=True, **arguments)
    assert written == expected


def test_call_history_has_the_published_form(template: Any) -> None:
    call = {"function": {"name": "get_temp", "arguments": {"city": "Oslo", "days": 2}}}
    messages = [
        *_user("temp?"),
        {"role": "assistant", "reasoning_content": "need tool", "content": "Let me look.",
         "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "6"},
    ]  # fmt: skip
    written = template.render(messages=messages, add_generation_prompt=True)
    assert written == (
        "<|im_start|>user\ntemp?<|im_end|>\n<|im_start|>assistant\n<think>\nneed tool\n</think>\n\n"
        "Let me look.\n\n<tool_call>\n<function=get_temp>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_earlier_reasoning_is_dropped_on_request(template: Any) -> None:
    messages = [*_user("q1"), {"role": "assistant", "content": "a1"}, *_user("q2")]
    written = template.render(
        messages=messages, preserve_thinking=False, add_generation_prompt=True
    )
    assert written == (
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"messages": [{"role": "system", "content": "S"}]},
        {"messages": [*_user("a"), {"role": "system", "content": "S"}]},
        {"messages": _user("a"), "reasoning_effort": "high"},
        {"messages": [{"role": "nobody", "content": "a"}]},
    ],
    ids=["no_user", "late_system", "unknown_effort", "unknown_role"],
)
def test_template_refuses(template: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(TemplateError):
        template.render(**arguments)


def test_packing_keeps_every_token_of_every_document(tokenizer: Tokenizer) -> None:
    documents = [encode(c, tokenizer) for c in islice(conversations(31), 150)]
    documents = [d for d in documents if len(d.ids) <= 512]
    found = []
    for row, count in pack(iter(documents), 512, CFG.endoftext_id):
        starts = sorted(set(row[START].tolist()))
        assert len(starts) == count
        assert all(begin % 4 == 0 for begin in starts)
        assert (row[POS] == range(512) - row[START]).all()
        for begin, end in zip(starts, [*starts[1:], 512], strict=True):
            found.append((row[IDS, begin:end].tolist(), int(row[TARGET, begin:end].sum())))
    assert len(found) == len(documents)
    wanted = sorted((d.ids.tolist(), int(d.target.sum())) for d in documents)
    for (ids, produced), (packed, marked) in zip(wanted, sorted(found), strict=True):
        assert packed[: len(ids)] == ids
        assert set(packed[len(ids) :]) <= {CFG.endoftext_id}
        assert produced == marked


@pytest.mark.parametrize("text", ["Grüße, 世界 🙂", "tab\there", "\x00\x7f", "a  b\r\n"], ids=ascii)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_checker_reads_numbers_calls_and_texts() -> None:
    assert is_right("arithmetic", "x</think>\n\nThe answer is 81.", "y 5</think>\n\n81<|im_end|>")
    assert not is_right("arithmetic", "</think>\n\nThe answer is 81.", "</think>\n\nmany")
    call = render(
        Conversation([Message("user", "q"), Message("assistant", "hello")], thinking=False)
    )
    assert call[1].text == "hello<|im_end|>"
    text = "<tool_call>\n<function=f>\n<parameter=a>\nx y\n</parameter>\n</function>\n</tool_call>"
    assert calls(text) == [("f", {"a": "x y"})]
    assert not is_right("tools", text, text.replace("x y", "x"))
