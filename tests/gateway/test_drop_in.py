"""Endpoints, fields and flags that users of other servers bring along."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from warhorse.v1 import tokenizer_pb2

from services.gateway.__main__ import listen, url_of
from services.gateway.config import GatewayConfig
from services.gateway.messages.convert import chat_fields
from services.gateway.messages.schema import MessagesRequest
from tests.gateway.conftest import MakeStack, Stack, until
from tests.gateway.fakes import text_reply
from tests.gateway.sse import parse_frames
from tests.gateway.test_bad_input import check_error

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def test_tokens_go_in_and_come_out(stack: Stack) -> None:
    body: dict[str, Any] = {
        "token_ids": [72, 105],
        "request_id": "mine",
        "sampling_params": {"max_tokens": 6, "temperature": 0.5, "seed": 3},
    }
    answer = (await stack.http.post("/inference/v1/generate", json=body)).json()
    (choice,) = answer["choices"]
    assert answer["request_id"] == "mine"
    assert bytes(choice["token_ids"]).decode() == "Hello!"
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert answer["usage"]["prompt_tokens"] == 2
    sent = stack.engine.requests[0]
    assert (sent.sampling.temperature, sent.sampling.seed) == (0.5, 3)
    assert sent.stopping.max_tokens == 6


async def test_tokens_are_streamed(stack: Stack) -> None:
    body = {"token_ids": [72], "stream": True, "stream_options": {"include_usage": True}}
    frames = parse_frames((await stack.http.post("/inference/v1/generate", json=body)).text)
    *pieces, usage = frames.frames
    tokens = [t for piece in pieces for t in piece["choices"][0]["token_ids"]]
    assert bytes(tokens).decode() == "Hello!"
    assert [p["choices"][0]["finish_reason"] for p in pieces][-1] == "stop"
    assert (usage["choices"], usage["usage"]["prompt_tokens"]) == ([], 1)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [300]}, "prompt"),
        ({"token_ids": [1], "sampling_params": {"top_p": 2}}, "top_p"),
        ({"token_ids": [1], "sampling_params": {"stream": True}}, "sampling_params.stream"),
    ],
)
async def test_wrong_token_requests_are_refused(stack: Stack, body: Any, param: str) -> None:
    check_error(await stack.http.post("/inference/v1/generate", json=body), 400, param)


async def test_prompts_of_messages_and_responses_are_shown(stack: Stack) -> None:
    message = {"system": "Be brief.", "messages": HI, "max_tokens": 5}
    shown = (await stack.http.post("/v1/messages/render", json=message)).json()
    assert shown["prompt_text"] == "system: Be brief.\nuser: Hi"
    body = {"instructions": "Be brief.", "input": "Hi"}
    assert (await stack.http.post("/v1/responses/render", json=body)).json() == shown
    assert stack.engine.requests == []


async def test_health_generate_generates_a_token_or_fails(make_stack: MakeStack) -> None:
    stack = await make_stack(peer_wait_seconds=0.1)
    assert (await stack.http.get("/health_generate")).status_code == 200
    assert stack.engine.requests[0].stopping.max_tokens == 1
    await stack.engine.kill()
    check_error(await stack.http.get("/health_generate"), 503, None)


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("/v1/embeddings", 404, "embeddings"),
        ("/v1/rerank", 404, "ranks"),
        ("/v1/audio/speech", 404, "sound"),
    ],
)
async def test_what_is_not_there_is_refused_with_a_reason(
    stack: Stack, path: str, status: int, word: str
) -> None:
    error = check_error(await stack.http.post(path, json={}), status, None)
    assert word in error["message"]


async def test_bad_words_are_sent_as_tokens_with_and_without_a_space(stack: Stack) -> None:
    for path, body in (("chat/completions", {"messages": HI}), ("completions", {"prompt": "x"})):
        await stack.http.post(f"/v1/{path}", json={**body, "bad_words": ["ab", " ab ", "c"]})
        words = [bytes(w.token_ids) for w in stack.engine.requests[-1].sampling.bad_words]
        assert words == [b"ab", b" ab", b"c", b" c"]


@pytest.mark.parametrize("budget", [0, 7, -1, None])
async def test_thinking_budget_is_sent_where_the_output_begins_inside_reasoning(
    stack: Stack, budget: int | None
) -> None:
    stack.tokenizer.reasoning_end = 9
    await stack.chat(thinking_token_budget=budget, reasoning_effort="high")
    sent = stack.engine.requests[-1].sampling
    assert sent.HasField("thinking_budget") == (budget in (0, 7))
    if budget in (0, 7):
        assert (sent.thinking_budget.tokens, sent.thinking_budget.end_token_id) == (budget, 9)
    stack.tokenizer.reasoning_end = None
    await stack.chat(thinking_token_budget=budget, reasoning_effort="none")
    assert not stack.engine.requests[-1].sampling.HasField("thinking_budget")


async def test_budget_of_a_message_bounds_its_thinking(stack: Stack) -> None:
    stack.tokenizer.reasoning_end = 9
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"messages": HI, "max_tokens": 1025, "thinking": thinking}
    request = MessagesRequest.model_validate(body)
    fields = chat_fields(request) | {"max_tokens": 5}  # the fake model has no room for more
    await stack.http.post("/v1/chat/completions", json=fields)
    assert stack.engine.requests[-1].sampling.thinking_budget.tokens == 1024


async def test_task_and_response_format_reach_the_renderer(stack: Stack) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    await stack.chat(task="title", response_format=form)
    sent = stack.tokenizer.renders[-1]
    assert (sent.task, json.loads(sent.response_format_json)) == ("title", form)
    await stack.chat(response_format={"type": "text"})
    assert stack.tokenizer.renders[-1].response_format_json == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_continued_message_in_front(stack: Stack, stream: bool) -> None:
    messages = [*HI, {"role": "assistant", "content": "Oh. "}]
    fields: dict[str, Any] = {
        "messages": messages,
        "echo": True,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    if stream:
        frames = (await stack.stream(**fields)).frames
        text = "".join(f["choices"][0]["delta"].get("content") or "" for f in frames)
    else:
        text = (await stack.chat(**fields)).json()["choices"][0]["message"]["content"]
    assert text == "Oh. Hello!"


@pytest.mark.parametrize("stream", [False, True])
async def test_flags_shape_the_response(make_stack: MakeStack, stream: bool) -> None:
    stack = await make_stack(
        response_role="model", enable_prompt_tokens_details=False, enable_force_include_usage=True
    )
    if stream:
        frames = (await stack.stream()).frames
        role, usage = frames[0]["choices"][0]["delta"]["role"], frames[-1]["usage"]
    else:
        body = (await stack.chat()).json()
        role, usage = body["choices"][0]["message"]["role"], body["usage"]
    assert role == "model"
    assert "prompt_tokens_details" not in usage and usage["prompt_tokens"] == 8


async def test_free_calls_are_text_where_they_are_switched_off(make_stack: MakeStack) -> None:
    stack = await make_stack(
        enable_auto_tool_choice=False, exclude_tools_when_tool_choice_none=False
    )
    await stack.chat(tools=[TOOL])
    opening = stack.tokenizer.openings[-1]
    assert opening.tool_choice == tokenizer_pb2.TOOL_CHOICE_NONE
    assert opening.tool_call_parser == "none"
    assert stack.tokenizer.renders[-1].tool_choice == tokenizer_pb2.TOOL_CHOICE_AUTO
    await stack.chat(tools=[TOOL], tool_choice="none")
    assert stack.tokenizer.renders[-1].tool_choice == tokenizer_pb2.TOOL_CHOICE_AUTO
    await stack.chat(tools=[TOOL], tool_choice="required")
    assert stack.tokenizer.openings[-1].tool_choice == tokenizer_pb2.TOOL_CHOICE_REQUIRED


async def test_a_full_queue_refuses_and_empties_again(make_stack: MakeStack) -> None:
    stack = await make_stack(max_num_queued=1)
    stack.tokenizer.render_delay = 0.5
    first = asyncio.create_task(stack.chat())
    await until(lambda: stack.app.state.gateway.queue.waiting == 1)
    refused = await stack.chat()
    assert "at most 1" in check_error(refused, 503, None)["message"]
    assert refused.headers["retry-after"] == "1"
    assert (await first).status_code == 200
    stack.tokenizer.render_delay = 0.0
    stack.engine.replies = [text_reply("x" * 100, delay=0.02)]
    running = asyncio.create_task(stack.chat())
    await until(lambda: stack.engine.running == 1)
    await until(lambda: stack.app.state.gateway.queue.waiting == 0)
    assert (await stack.chat()).status_code == 200  # one that generates does not wait
    running.cancel()


async def test_requests_with_too_many_headers_are_refused(stack: Stack) -> None:
    answer = await stack.http.get("/version", headers={f"x-{i}": "1" for i in range(260)})
    assert (answer.status_code, answer.text) == (400, "The request has more than 256 headers.")
    assert (await stack.http.get("/version", headers={"x": "1"})).status_code == 200


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 on this host")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_hosts_are_listened_on(host: str) -> None:
    config = GatewayConfig(host=host, port=0)
    with listen(config) as listening:
        assert listening.family is socket.AF_INET6
        assert url_of(config, listening).startswith("http://[::1]:")


async def test_a_unix_socket_is_served(make_stack: MakeStack) -> None:
    with tempfile.TemporaryDirectory(prefix="wh-") as folder:
        stack = await make_stack(uds=Path(folder) / "gateway.sock")
        assert (await stack.chat()).json()["choices"][0]["message"]["content"] == "Hello!"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"override_generation_config": '{"top_p": "high"}'}, ("top_p", "above 0", "high")),
        ({"override_generation_config": '{"temperature": 9}'}, ("temperature", "0 to 2", "9")),
        ({"override_generation_config": '{"heat": 1}'}, ("heat", "temperature")),
        ({"ssl_keyfile": Path("k")}, ("ssl_certfile",)),
        ({"ssl_cert_reqs": 2}, ("ssl_certfile",)),
        ({"disable_log_requests": False}, ("never logged",)),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=words[0]) as caught:
        GatewayConfig(**settings)
    assert all(word in str(caught.value) for word in words)


async def test_wrong_defaults_of_a_checkpoint_are_left_out(make_stack: MakeStack) -> None:
    stack = await make_stack(checkpoint={"temperature": "hot", "top_k": 7, "do_sample": True})
    assert (await stack.chat()).status_code == 200
    sent = stack.engine.requests[-1].sampling
    assert (sent.temperature, sent.top_k) == (1.0, 7)
