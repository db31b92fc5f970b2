"""The trained model behind the whole stack, asked by the OpenAI SDK: its answers are right.

The questions are held out: their operands, arguments and names never occur in training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from services.engine.checkpoints.nano.conversation import Conversation, Message
from services.engine.checkpoints.nano.corpus import held_out
from tests.stack.conftest import Stack

pytestmark = pytest.mark.slow

SEED = 23  # another draw than the one behind scores.json
COUNT = 40


def ask(stack: Stack, conversation: Conversation) -> ChatCompletionMessage:
    """The model's own last message, given everything before it."""
    messages: Any = conversation.openai_messages()[:-1]
    tools: Any = {"tools": conversation.tools} if conversation.tools else {}
    answer = stack.client().chat.completions.create(
        model="nano-qwen3.8-flash-next",
        messages=messages,
        temperature=0,
        max_tokens=300,
        extra_body={"reasoning_effort": conversation.effort},
        **tools,
    )
    assert answer.choices[0].finish_reason == ("tool_calls" if has_calls(conversation) else "stop")
    return answer.choices[0].message


def has_calls(conversation: Conversation) -> bool:
    return bool(conversation.messages[-1].calls)


def right_number(expected: Message, got: ChatCompletionMessage) -> bool:
    return (
        re.findall(r"-?\d+", expected.content)[-1:] == re.findall(r"-?\d+", got.content or "")[-1:]
    )


def right_text(expected: Message, got: ChatCompletionMessage) -> bool:
    return (got.content or "").strip() == expected.content.strip()


def right_calls(expected: Message, got: ChatCompletionMessage) -> bool:
    found = [call.to_dict()["function"] for call in got.tool_calls or ()]
    pairs: list[Any] = [(f["name"], json.loads(f["arguments"])) for f in found]  # type: ignore[index]
    return pairs == [(call.name, call.arguments) for call in expected.calls]


@pytest.mark.parametrize(
    ("task", "right", "share"),
    [
        ("arithmetic", right_number, 0.95),
        ("tools", right_calls, 0.90),
        ("passages", right_text, 0.90),
    ],
)
@pytest.mark.usefixtures("idle")
def test_held_out_questions_are_answered(
    stack: Stack,
    task: str,
    right: Callable[[Message, ChatCompletionMessage], bool],
    share: float,
) -> None:
    asked = list(islice(held_out(task, SEED, True), COUNT))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda conversation: ask(stack, conversation), asked))
    wrong = [
        (conversation.messages[-2].content, answer.to_dict())
        for conversation, answer in zip(asked, answers, strict=True)
        if not right(conversation.messages[-1], answer)
    ]
    assert len(wrong) <= (1 - share) * COUNT, wrong


def test_a_tool_is_declared_called_answered_and_reported(stack: Stack) -> None:
    """One whole tool loop, as an agent runs it."""
    tool: Any = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    settings: Any = {"model": "nano-qwen3.8-flash-next", "tools": [tool], "temperature": 0}
    client = stack.client()
    first = client.chat.completions.create(messages=messages, **settings).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.tool_calls is not None
    call = first.message.tool_calls[0]
    function: Any = call.to_dict()["function"]
    assert (function["name"], json.loads(function["arguments"])) == (
        "get_weather",
        {"city": "Oslo"},
    )
    messages += [
        first.message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"},
    ]
    last = client.chat.completions.create(messages=messages, **settings).choices[0]
    assert last.finish_reason == "stop"
    assert "12 degrees" in (last.message.content or "")
