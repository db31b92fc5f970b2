"""The Anthropic interface, driven by its SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from warhorse.v1 import common_pb2

from services.common.errors import ServiceError
from tests.gateway.conftest import MakeStack, Stack
from tests.gateway.fakes import FINISH_LENGTH, Reply, text_reply
from tests.gateway.vocabulary import END_THINK, call, ids

TOOLS = [
    {"name": "look", "description": "Look up.", "input_schema": {"type": "object"}},
    {"type": "web_search_20250305", "name": "web_search"},
]
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="k", max_retries=0) as sdk:
        yield sdk


def thought_and_call() -> Reply:
    return Reply([[*ids("Hmm."), END_THINK, *ids("Let me look."), *call("look", '{"q": "é"}')]])


async def test_message_has_text_reason_and_counts(stack: Stack, client: Any) -> None:
    stack.engine.replies = [text_reply("Hello!", cached=2)]
    message = await client.messages.create(model="", max_tokens=50, messages=HI)
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake-model")
    assert message.id.startswith("msg_") and message.stop_reason == "end_turn"
    assert [block.text for block in message.content] == ["Hello!"]
    usage = message.usage
    prompt = len("user: Hi")
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (prompt - 2, 2)
    assert usage.output_tokens == len("Hello!")


@pytest.mark.parametrize("streaming", [False, True])
async def test_thinking_text_and_call_are_blocks_in_order(
    stack: Stack, client: Any, streaming: bool
) -> None:
    stack.engine.replies = [thought_and_call()]
    fields: dict[str, Any] = {
        "model": "fake-model",
        "max_tokens": 400,
        "messages": HI,
        "tools": TOOLS,
        "thinking": {"type": "enabled"},
    }
    if streaming:
        async with client.messages.stream(**fields) as stream:
            message = await stream.get_final_message()
    else:
        message = await client.messages.create(**fields)
    thinking, text, tool = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hmm.") and thinking.signature
    assert (text.type, text.text) == ("text", "Let me look.")
    assert (tool.type, tool.name, tool.input) == ("tool_use", "look", {"q": "é"})
    assert tool.id.startswith("call_") and message.stop_reason == "tool_use"
    rendered = stack.tokenizer.renders[0]
    assert [t.name for t in rendered.tools] == ["look"]
    assert rendered.enable_thinking is True


async def test_stream_has_the_documented_events(stack: Stack) -> None:
    stack.engine.replies = [thought_and_call()]
    body: dict[str, Any] = {"max_tokens": 400, "messages": HI, "tools": TOOLS, "stream": True}
    body["thinking"] = {"type": "enabled"}
    text = (await stack.http.post("/v1/messages?beta=true", json=body)).text
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    inner = [n for i, n in enumerate(names[1:-2]) if n != names[i]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert inner == block * 3
    assert "[DONE]" not in text and "signature_delta" in text


async def test_history_reaches_the_renderer(stack: Stack, client: Any) -> None:
    history = [
        {"role": "user", "content": "Where?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "any"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"q": "here"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "There."},
                {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=4711;"},
        {"type": "text", "text": "Be brief."},
    ]
    await client.messages.create(
        model="fake-model", max_tokens=9, messages=history, system=system, tools=TOOLS
    )
    rendered = stack.tokenizer.renders[0].messages
    assert [m.role for m in rendered] == ["system", "user", "assistant", "tool", "user"]
    assert [p.text for p in rendered[0].content] == ["Be brief."]
    assert rendered[2].reasoning == "Look."
    (made,) = rendered[2].tool_calls
    assert (made.id, made.name, made.arguments) == ("toolu_1", "look", '{"q":"here"}')
    assert (rendered[3].tool_call_id, rendered[3].content[0].text) == ("toolu_1", "There.")
    assert rendered[4].content[0].text == "And?"


@pytest.mark.parametrize(
    ("reply", "fields", "reason"),
    [
        (text_reply("Hello!", finish=FINISH_LENGTH), {"max_tokens": 3}, "max_tokens"),
        (text_reply("ab STOP cd"), {"stop_sequences": ["STOP"]}, "stop_sequence"),
    ],
)
async def test_reason_of_the_end(
    stack: Stack, client: Any, reply: Reply, fields: dict[str, Any], reason: str
) -> None:
    stack.engine.replies = [reply]
    arguments: dict[str, Any] = {"model": "", "max_tokens": 50, "messages": HI, **fields}
    message = await client.messages.create(**arguments)
    assert message.stop_reason == reason
    assert message.stop_sequence == ("STOP" if reason == "stop_sequence" else None)


async def test_tokens_are_counted_by_the_renderer(stack: Stack, client: Any) -> None:
    count = await client.messages.count_tokens(model="fake-model", messages=HI, tools=TOOLS)
    assert count.input_tokens == len("user: Hi")
    assert stack.engine.requests == [] and len(stack.tokenizer.renders[0].tools) == 1


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, 400,
         "invalid_request_error", "messages.0.content.0"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, 400,
         "invalid_request_error", "budget_tokens"),
        ({"tool_choice": {"type": "tool", "name": "nope"}, "tools": TOOLS}, 400,
         "invalid_request_error", "nope"),
    ],
)  # fmt: skip
async def test_errors_have_the_shape_of_the_interface(
    stack: Stack, fields: dict[str, Any], status: int, kind: str, words: str
) -> None:
    body = {"model": "fake-model", "max_tokens": 100, "messages": HI, **fields}
    response = await stack.http.post("/v1/messages", json=body)
    assert response.status_code == status
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert words in error["error"]["message"]


async def test_missing_key_has_the_shape_too(make_stack: MakeStack) -> None:
    stack = await make_stack(api_key=("secret",))
    body = {"max_tokens": 5, "messages": HI}
    response = await stack.http.post("/v1/messages", json=body)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    headers = {"x-api-key": "secret"}
    assert (await stack.http.post("/v1/messages", json=body, headers=headers)).status_code == 200


async def test_broken_stream_ends_with_an_error_event(stack: Stack) -> None:
    lost = ServiceError(common_pb2.ERROR_REASON_INTERNAL, "gone")
    stack.engine.replies = [text_reply("Hello!", break_after=2, broken=lost, delay=0.05)]
    body = {"max_tokens": 50, "messages": HI, "stream": True}
    text = (await stack.http.post("/v1/messages", json=body)).text
    names = [line for line in text.splitlines() if line.startswith("event: ")]
    assert names[-1] == "event: error" and "[DONE]" not in text
