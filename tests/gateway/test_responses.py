"""The Responses interface, driven by the OpenAI SDK."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from warhorse.v1 import common_pb2

from services.common.errors import ServiceError
from services.gateway.responses.store import ResponseStore, StoredResponse
from tests.gateway.conftest import Stack
from tests.gateway.fakes import FINISH_LENGTH, Reply, text_reply
from tests.gateway.test_bad_input import check_error
from tests.gateway.vocabulary import END_THINK, call, ids

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patch files."}
SPACE = {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "get"}]}
HOSTED = {"type": "web_search"}


def rich_reply() -> Reply:
    patch = json.dumps({"input": "*** Begin"})
    tokens = [*ids("Hmm."), END_THINK, *ids("So."), *call("apply_patch", patch)]
    return Reply([[*tokens, *call("mcp__get", "{}")]])


async def test_response_has_text_and_counts(stack: Stack) -> None:
    stack.engine.replies = [text_reply("Hello!", cached=3)]
    response = await stack.sdk.responses.create(model="fake-model", input="Hi")
    assert response.id.startswith("resp_") and response.status == "completed"
    assert response.output_text == "Hello!"
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (len("user: Hi"), 3)
    assert (usage.output_tokens, usage.total_tokens) == (6, 6 + len("user: Hi"))


@pytest.mark.parametrize("streaming", [False, True])
async def test_reasoning_text_custom_and_namespaced_calls(stack: Stack, streaming: bool) -> None:
    stack.engine.replies = [rich_reply()]
    fields: dict[str, Any] = {
        "model": "fake-model",
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "tools": [LOOK, PATCH, SPACE, HOSTED],
        "reasoning": {"effort": "high"},
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    if streaming:
        stream = await stack.sdk.responses.create(**fields, stream=True)
        streamed = [event async for event in stream]
        numbers = [event.sequence_number for event in streamed]
        assert numbers == list(range(len(numbers)))
        response = streamed[-1].response
        done = [e.item.id for e in streamed if e.type == "response.output_item.done"]
        assert done == [item.id for item in response.output]
    else:
        response = await stack.sdk.responses.create(**fields)
    reasoning, message, custom, function = response.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text == "Hmm."
    assert message.type == "message" and message.content[0].text == "So."
    expected = ("custom_tool_call", "apply_patch", "*** Begin")
    assert (custom.type, custom.name, custom.input) == expected
    assert (function.type, function.name, function.arguments) == ("function_call", "get", "{}")
    assert function.model_dump()["namespace"] == "mcp"
    rendered = stack.tokenizer.renders[0]
    assert [t.name for t in rendered.tools] == ["look", "apply_patch", "mcp__get"]
    assert rendered.reasoning_effort == "high" and rendered.messages[0].role == "system"


async def test_stream_has_every_done_event_in_order(stack: Stack) -> None:
    stack.engine.replies = [Reply([[*ids("Hi"), *call("look", "{}")]])]
    body = {"input": "Hi", "tools": [LOOK], "stream": True}
    text = (await stack.http.post("/v1/responses", json=body)).text
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    short = [n.removeprefix("response.") for i, n in enumerate(names) if n != names[i - 1]]
    assert short == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert "[DONE]" not in text


async def test_whole_history_of_a_coding_client(stack: Stack) -> None:
    items = [
        {"type": "message", "role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{not json"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "***"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    ]
    body = {
        "client_metadata": {"x": "y"}, "include": ["reasoning.encrypted_content"], "input": items,
        "instructions": "I", "model": "fake-model", "parallel_tool_calls": False,
        "prompt_cache_key": "k", "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False, "stream": False, "tool_choice": "auto", "tools": [LOOK, PATCH],
    }  # fmt: skip
    answer = (await stack.http.post("/v1/responses", json=body)).json()
    assert (await stack.http.get(f"/v1/responses/{answer['id']}")).status_code == 404
    messages = stack.tokenizer.renders[0].messages
    roles = ["system", "developer", "user", "assistant", "tool", "tool"]
    assert [m.role for m in messages] == roles
    turn = messages[3]
    assert (turn.reasoning, turn.content[0].text) == ("R", "A")
    calls = [(c.id, c.arguments) for c in turn.tool_calls]
    assert calls == [("c1", "{not json"), ("c2", '{"input":"***"}')]
    assert [m.content[0].text for m in messages[4:]] == ["found", "done"]


async def test_stored_response_is_fetched_continued_and_deleted(stack: Stack) -> None:
    first = await stack.sdk.responses.create(model="fake-model", input="One")
    assert (await stack.sdk.responses.retrieve(first.id)).output_text == first.output_text
    await stack.sdk.responses.create(model="fake-model", input="Two", previous_response_id=first.id)
    rendered = stack.tokenizer.renders[1].messages
    texts = [(m.role, m.content[0].text) for m in rendered]
    assert texts == [("user", "One"), ("assistant", "Hello!"), ("user", "Two")]
    await stack.sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await stack.sdk.responses.retrieve(first.id)
    body = {"input": "x", "previous_response_id": "resp_none"}
    check_error(await stack.http.post("/v1/responses", json=body), 404, "previous_response_id")


async def test_length_makes_a_response_incomplete(stack: Stack) -> None:
    stack.engine.replies = [text_reply("Hello!", finish=FINISH_LENGTH)]
    response = await stack.sdk.responses.create(model="fake-model", input="Hi", max_output_tokens=3)
    assert response.status == "incomplete" and response.output_text == "Hel"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input.0.content.0.type"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input.0.name"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tool_choice": {"type": "teapot"}}, "tool_choice"),
    ],
)
async def test_wrong_values_are_named(stack: Stack, fields: dict[str, Any], param: str) -> None:
    response = await stack.http.post("/v1/responses", json={"input": "Hi", **fields})
    check_error(response, 400, param)


async def test_broken_stream_ends_with_a_failed_response(stack: Stack) -> None:
    lost = ServiceError(common_pb2.ERROR_REASON_INTERNAL, "gone")
    stack.engine.replies = [text_reply("Hello!", break_after=2, broken=lost, delay=0.05)]
    text = (await stack.http.post("/v1/responses", json={"input": "Hi", "stream": True})).text
    last = json.loads(text.rstrip().splitlines()[-1].removeprefix("data: "))
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed" and last["response"]["error"]["message"]


def test_store_keeps_within_bytes_and_time() -> None:
    now = 0.0
    store = ResponseStore(200, 10.0, lambda: now)
    for number in range(5):
        store.put(StoredResponse({"id": f"resp_{number}", "pad": "x" * 40}, []))
    assert store.nbytes <= 200
    assert store.get("resp_0") is None and store.get("resp_4") is not None
    store.put(StoredResponse({"id": "resp_huge", "pad": "x" * 400}, []))
    assert store.get("resp_huge") is None
    now = 11.0
    assert store.get("resp_4") is None and store.nbytes == 0
