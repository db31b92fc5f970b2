"""The family's rules, and arguments of earlier calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import ServiceError
from services.tokenizer.rendering.conversation import Conversation, Message, PastCall
from services.tokenizer.rendering.history import argument_object
from services.tokenizer.rendering.rules import QwenRules

USER = Message("user", ("q",))
BASE = Conversation((USER,))


@pytest.mark.parametrize(
    ("effort", "thinking", "arguments", "shown"),
    [
        (None, None, {}, {}),
        (None, False, {}, {"enable_thinking": False}),
        ("minimal", None, {}, {"reasoning_effort": "low"}),
        ("low", None, {}, {"reasoning_effort": "low"}),
        ("medium", True, {}, {"reasoning_effort": "medium", "enable_thinking": True}),
        ("high", None, {}, {"reasoning_effort": "xhigh"}),
        ("max", None, {}, {"reasoning_effort": "xhigh"}),
        ("none", None, {}, {"enable_thinking": False}),
        ("none", True, {}, {"enable_thinking": False}),
        ("none", None, {"enable_thinking": True}, {"enable_thinking": True}),
        ("high", False, {}, {"enable_thinking": False}),
        (None, None, {"reasoning_effort": "high"}, {"reasoning_effort": "xhigh"}),
        ("low", None, {"reasoning_effort": "high"}, {"reasoning_effort": "low"}),
        (None, None, {"preserve_thinking": False}, {"preserve_thinking": False}),
    ],
)
def test_effort_and_thinking(
    effort: str | None, thinking: bool | None, arguments: dict[str, Any], shown: dict[str, Any]
) -> None:
    conversation = replace(BASE, effort=effort, enable_thinking=thinking, arguments=arguments)
    assert QwenRules().arguments(conversation) == shown


@pytest.mark.parametrize("effort", ["extreme", "", "LOW"])
def test_unknown_effort_is_refused_naming_the_known_ones(effort: str) -> None:
    conversation = replace(BASE, arguments={"reasoning_effort": effort})
    with pytest.raises(ServiceError, match="medium") as error:
        QwenRules().arguments(conversation)
    assert error.value.field == "reasoning_effort"


def test_later_system_and_developer_messages_are_merged_into_the_first() -> None:
    messages = (
        USER,
        Message("developer", ("d ",)),
        Message("assistant", ("a",)),
        Message("system", ("s",)),
        Message("system", (" ",)),
    )
    prepared = QwenRules().prepare(Conversation(messages)).messages
    assert [(m.role, "".join(m.parts)) for m in prepared] == [
        ("system", "d\n\ns"),
        ("user", "q"),
        ("assistant", "a"),
    ]


def results(*ids: str) -> list[str]:
    calls = tuple(PastCall(i, "f", "{}") for i in ("c1", "c2", "c3"))
    run = tuple(Message("tool", (i,), call_id=i) for i in ids)
    messages = (USER, Message("assistant", calls=calls), *run, USER)
    prepared = QwenRules().prepare(Conversation(messages)).messages
    return [m.call_id for m in prepared if m.role == "tool"]


def test_results_follow_the_order_of_their_calls() -> None:
    assert results("c3", "c1", "c2") == ["c1", "c2", "c3"]
    assert results("c3", "c1") == ["c1", "c3"]


@pytest.mark.parametrize("ids", [("c2", "zz"), ("c2", ""), ("c2", "c1", "c2")])
def test_results_with_unclear_ids_keep_their_order(ids: tuple[str, ...]) -> None:
    assert results(*ids) == list(ids)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("  ", {}),
        ("null", {}),
        ("{}", {}),
        ('{"a": 1.50}', {"a": 1.5}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('{"a": "abc', {"a": "abc"}),
        ('{"a": "x", "b": "say \\"hi', {"a": "x", "b": 'say "hi'}),
        ('{"a": "x", "b"', {"a": "x"}),
        ('{"a": "x", "b":', {"a": "x"}),
        ('{"a": [1, {"k": 2', {"a": [1, {"k": 2}]}),
        ('{"a": [1, 2], "b": tru', {"a": [1, 2]}),
        ("{", {}),
        ("oops", {"arguments": "oops"}),
        ("[1]", {"arguments": "[1]"}),
        ("5", {"arguments": "5"}),
        ('{"a": }', {"arguments": '{"a": }'}),
        ("{]", {"arguments": "{]"}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
)
def test_arguments_of_the_history(text: str, value: dict[str, Any]) -> None:
    assert argument_object(text) == value
