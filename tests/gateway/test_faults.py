"""Peers that die, refuse or stall; clients that leave or take nothing. Nothing hangs or leaks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import httpx
import pytest
from warhorse.v1 import common_pb2

from services.common.errors import ServiceError
from tests.gateway.conftest import MakeStack, Stack, until
from tests.gateway.fakes import Reply, text_reply
from tests.gateway.interfaces import INTERFACES, read_stream
from tests.gateway.sse import parse_frames
from tests.gateway.test_bad_input import check_error
from tests.gateway.vocabulary import END_THINK, call, ids

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
LOST = ServiceError(common_pb2.ERROR_REASON_ENGINE_LOST, "the core died")
FULL = ServiceError(common_pb2.ERROR_REASON_QUEUE_FULL, "queue full", retry_after=3)


async def leave(stack: Stack, body: dict[str, Any], condition: Any) -> None:
    """Send a request and close the connection once `condition` holds."""
    request = asyncio.create_task(stack.http.post(CHAT, json={**BODY, **body}))
    await until(condition)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_a_client_that_leaves_cancels_its_generation(
    stack: Stack, stream: bool, phase: str
) -> None:
    engine = stack.engine
    never = asyncio.Event()
    hold = None if phase == "decode" else never
    engine.replies = [
        text_reply("x" * 400, delay=0.01, hold=hold, accept=phase != "queued"),
    ]
    began = {"decode": lambda: engine.sent_tokens > 3}.get(phase, lambda: engine.running == 1)
    await leave(stack, {"stream": stream, "max_tokens": 400}, began)
    await until(lambda: engine.running == 0 and engine.cancelled == 1, 1.0)
    text = (await stack.http.get("/metrics")).text
    assert 'status="499"' in text and 'finished_reason="abort"' in text
    await until(lambda: stack.tokenizer.open_choices == 0)


async def test_a_client_that_leaves_while_its_prompt_is_rendered(stack: Stack) -> None:
    stack.tokenizer.render_delay = 0.3
    await leave(stack, {}, lambda: len(stack.tokenizer.renders) == 1)
    await asyncio.sleep(0.4)
    assert stack.engine.requests == []


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_engine_that_dies_in_mid_stream_gives_an_error_frame(
    stack: Stack, path: str
) -> None:
    stack.engine.replies = [text_reply("x" * 200, delay=0.02)]
    request = asyncio.create_task(stack.stream(path, max_tokens=200))
    await until(lambda: stack.engine.sent_tokens > 5)
    began = time.monotonic()
    await stack.engine.kill()
    frames = await request
    assert time.monotonic() - began < 2
    assert frames.done and frames.frames[-1]["error"]["code"] == 503
    assert frames.frames[-1]["error"]["type"] == "ServiceUnavailableError"
    assert (await stack.http.get("/health")).status_code == 503


async def test_the_next_request_after_a_restart_works(stack: Stack) -> None:
    await stack.engine.kill()
    request = asyncio.create_task(stack.chat())
    await asyncio.sleep(0.3)
    await stack.engine.start()
    assert (await request).status_code == 200


async def test_a_request_without_an_engine_is_refused_in_bounded_time(
    make_stack: MakeStack,
) -> None:
    stack = await make_stack(start_engine=False, peer_wait_seconds=3)
    error = check_error(await stack.chat(), 503, None)
    assert "No engine is serving" in error["message"]
    began = time.monotonic()
    response = await stack.chat()
    assert time.monotonic() - began < 2.5, "a long outage refuses at once"
    assert response.headers["retry-after"] == "2"
    assert (await stack.http.get("/health")).status_code == 503
    assert (await stack.http.get("/v1/models")).json()["data"] == []
    await stack.engine.start()
    await until(lambda: stack.app.state.gateway.healthy)
    assert (await stack.chat()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_sent_nothing_is_run_again(stack: Stack, stream: bool) -> None:
    stack.engine.replies = [
        Reply([ids("lost")], break_after=0, broken=LOST),
        text_reply("kept"),
    ]
    if stream:
        text = (await stack.stream()).joined("content")
    else:
        text = (await stack.chat()).json()["choices"][0]["message"]["content"]
    assert text == "kept"
    assert len(stack.engine.requests) == 2


async def test_a_body_in_the_making_is_started_over(stack: Stack) -> None:
    stack.engine.replies = [
        text_reply("half of it", break_after=4, broken=LOST, delay=0.01),
        text_reply("all of it"),
    ]
    body = (await stack.chat()).json()
    assert body["choices"][0]["message"]["content"] == "all of it"
    assert body["usage"]["completion_tokens"] == 9


async def test_a_stream_in_the_making_is_not_started_over(stack: Stack) -> None:
    stack.engine.replies = [
        text_reply("half of it", break_after=4, broken=LOST, delay=0.05),
        text_reply("all of it"),
    ]
    frames = await stack.stream()
    assert frames.joined("content") == "half" and frames.done
    assert frames.frames[-1]["error"]["message"] == "the core died"
    assert len(stack.engine.requests) == 1


async def test_an_engine_that_keeps_dying_is_tried_twice(stack: Stack) -> None:
    stack.engine.replies = [Reply([ids("x")], break_after=0, broken=LOST)]
    check_error(await stack.chat(), 503, None)
    assert len(stack.engine.requests) == 2


async def test_a_killed_engine_process_is_bridged(stack: Stack) -> None:
    stack.engine.replies = [text_reply("x", hold=asyncio.Event()), text_reply("kept")]
    request = asyncio.create_task(stack.stream())
    await until(lambda: stack.engine.running == 1)
    await stack.engine.kill()
    await asyncio.sleep(0.5)
    await stack.engine.start()
    assert (await request).joined("content") == "kept"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_choice_fails_its_request(stack: Stack, stream: bool) -> None:
    failed = common_pb2.ERROR_REASON_NUMERIC
    stack.engine.replies = [text_reply("ab", failed=failed, delay=0.05)]
    if stream:
        frames = await stack.stream()
        assert frames.done and frames.frames[-1]["error"]["code"] == 500
    else:
        check_error(await stack.chat(), 500, None)


async def test_a_full_queue_is_a_503_with_retry_after(stack: Stack) -> None:
    stack.engine.replies = [Reply([[]], error=FULL)]
    for stream in (False, True):
        response = await stack.chat(stream=stream)
        assert check_error(response, 503, None)["type"] == "Service Unavailable"
        assert response.headers["retry-after"] == "3"


async def test_a_full_queue_sends_the_request_to_another_engine(make_stack: MakeStack) -> None:
    other = await make_stack()
    stack = await make_stack(start_engine=False)
    await stack.engine.start()
    stack.engine.replies = [Reply([[]], error=FULL)]
    targets = (stack.engine.target, other.engine.target)
    both = await make_stack(engine_address=targets)
    await until(lambda: len(both.app.state.gateway.engines.set.healthy()) == 2)
    assert (await both.chat()).status_code == 200
    assert len(stack.engine.requests) == len(other.engine.requests) == 1


ANSWER = [
    *ids("thinking "),
    END_THINK,
    *ids("Tady je žluťoučký kůň 🐎. "),
    *call("f", '{"a": "š"}'),
]


@pytest.mark.parametrize("after", [1, 9, 12, 30, len(ANSWER) - 8, len(ANSWER)])
async def test_a_lost_tokenizer_is_replaced_without_a_seam(stack: Stack, after: int) -> None:
    stack.engine.replies = [Reply([ANSWER], delay=0.001)]
    tools = [{"type": "function", "function": {"name": "f"}}]
    stack.tokenizer.die_after_tokens = after
    frames = await stack.stream(reasoning_effort="low", tools=tools, logprobs=True)
    assert frames.joined("reasoning") == "thinking "
    assert frames.joined("content") == "Tady je žluťoučký kůň 🐎. "
    calls = [c["delta"]["tool_calls"][0] for c in frames.choices if "tool_calls" in c["delta"]]
    assert "".join(c["function"]["arguments"] for c in calls) == '{"a": "š"}'
    assert sum("id" in c for c in calls) == 1
    assert frames.finish()["finish_reason"] == "tool_calls"
    entries = [e for c in frames.choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert len(entries) == len(ANSWER), "every token is reported once"
    assert len(stack.tokenizer.openings) == stack.tokenizer.parse_calls == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_cannot_be_parsed_fails_alone(stack: Stack, stream: bool) -> None:
    stack.engine.replies = [text_reply("x" * 100, delay=0.01)]
    stack.tokenizer.parse_error = common_pb2.ERROR_REASON_INVALID_FIELD
    error = check_error(await stack.chat(stream=stream), 400, None)
    assert error["message"] == "cannot parse"
    stack.tokenizer.parse_error = None
    assert (await stack.chat()).status_code == 200
    assert stack.tokenizer.parse_calls == 1


async def test_a_stop_string_survives_the_loss_of_the_tokenizer(stack: Stack) -> None:
    stack.engine.replies = [text_reply("one two STOP three", delay=0.002)]
    stack.tokenizer.die_after_tokens = 10
    body = (await stack.chat(stop="STOP")).json()
    assert body["choices"][0]["message"]["content"] == "one two "
    assert body["usage"]["completion_tokens"] == 12


async def test_a_killed_tokenizer_process_is_bridged(stack: Stack) -> None:
    stack.engine.replies = [text_reply("x" * 100, delay=0.01)]
    request = asyncio.create_task(stack.stream())
    await until(lambda: stack.engine.sent_tokens > 10)
    await stack.tokenizer.kill()
    await asyncio.sleep(0.3)
    await stack.tokenizer.start()
    frames = await request
    assert frames.joined("content") == "x" * 100 and frames.done


async def test_a_client_that_leaves_while_the_tokenizer_restarts(stack: Stack) -> None:
    stack.engine.replies = [text_reply("x" * 300, delay=0.01)]
    request = asyncio.create_task(stack.stream(max_tokens=300))
    await until(lambda: stack.engine.sent_tokens > 10)
    await stack.tokenizer.kill()
    await asyncio.sleep(0.2)
    request.cancel()
    await until(lambda: stack.engine.running == 0)
    stack.tokenizer.open_choices = 0
    await stack.tokenizer.start()
    await until(lambda: stack.app.state.gateway.healthy)
    assert (await stack.chat(max_tokens=5)).status_code == 200
    assert stack.tokenizer.open_choices == 0


async def test_a_tokenizer_that_stays_away_ends_the_stream(make_stack: MakeStack) -> None:
    stack = await make_stack(peer_wait_seconds=0.5)
    stack.engine.replies = [text_reply("x" * 300, delay=0.01)]
    request = asyncio.create_task(stack.stream(max_tokens=300))
    await until(lambda: stack.engine.sent_tokens > 10)
    await stack.tokenizer.kill()
    frames = await asyncio.wait_for(request, 3)
    assert frames.done and frames.frames[-1]["error"]["code"] == 503
    assert len(stack.engine.requests) == 1, "the engine is not at fault"


async def test_another_tokenizer_takes_over(make_stack: MakeStack) -> None:
    first = await make_stack()
    second = await make_stack()
    stack = await make_stack(
        tokenizer_address=(first.tokenizer.target, second.tokenizer.target), peer_wait_seconds=0.5
    )
    await until(lambda: len(stack.app.state.gateway.tokenizers.set.healthy()) == 2)
    for _ in range(4):
        assert (await stack.chat()).status_code == 200
    assert len(first.tokenizer.renders) == len(second.tokenizer.renders) == 2
    assert len(first.tokenizer.openings) == len(second.tokenizer.openings) == 2
    await first.tokenizer.kill()
    for _ in range(4):
        assert (await stack.chat()).status_code == 200


async def test_keep_alive_comments_bridge_a_long_prefill(make_stack: MakeStack) -> None:
    stack = await make_stack(sse_keep_alive_interval=0.1)
    hold = asyncio.Event()
    stack.engine.replies = [text_reply("late", hold=hold)]
    request = asyncio.create_task(stack.stream())
    await asyncio.sleep(0.5)
    hold.set()
    frames = await request
    assert 2 <= len(frames.comments) <= 6 and set(frames.comments) == {": keep-alive"}
    assert frames.joined("content") == "late"


@pytest.mark.parametrize("name", INTERFACES)
async def test_an_error_after_a_keep_alive_comes_in_the_stream(
    make_stack: MakeStack, name: str
) -> None:
    stack = await make_stack(sse_keep_alive_interval=0.1)
    hold = asyncio.Event()
    failed = common_pb2.ERROR_REASON_INTERNAL
    stack.engine.replies = [text_reply("", failed=failed, hold=hold)]
    interface, text = INTERFACES[name], ""
    body = interface.body("Hi", 10) | {"stream": True}
    async with stack.http.stream("POST", interface.path, json=body) as answer:
        async for part in answer.aiter_text():
            text += part
            hold.set()
    stream = read_stream(interface, text)
    expected = {"chat": 500, "responses": "server_error", "messages": "api_error"}
    stream.assert_failed(expected[name])
    if name == "responses":
        opened = ["response.created", "response.in_progress", "response.failed"]
        assert [event["type"] for event in stream.events] == opened
        assert [event["sequence_number"] for event in stream.events] == [0, 1, 2]


async def open_stalled(stack: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that asks for a stream and reads nothing until its transport is resumed."""
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.transport.pause_reading()
    body = b'{"stream":true,"max_tokens":400,"messages":[{"role":"user","content":"x"}]}'
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return reader, writer


async def test_a_client_that_takes_nothing_is_cut(make_stack: MakeStack) -> None:
    stack = await make_stack(stall_seconds=0.5, served_model_name=("m" * 40_000,))
    stack.engine.replies = [text_reply("x" * 400, delay=0.002)]
    metrics = stack.app.state.gateway.metrics
    reader, writer = await open_stalled(stack)
    await until(lambda: b'finished_reason="abort"' in metrics.render())
    writer.transport.resume_reading()
    with contextlib.suppress(ConnectionResetError):
        assert b"[DONE]" not in await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert (await stack.http.get("/health")).status_code == 200


async def test_tokens_that_pile_up_are_parsed_together(stack: Stack) -> None:
    stack.engine.replies = [text_reply("y" * 300)]
    stack.tokenizer.parse_delay = 0.01
    frames = await stack.stream(max_tokens=300)
    assert frames.joined("content") == "y" * 300
    assert len(stack.tokenizer.messages) < 60 and sum(stack.tokenizer.messages) == 300


async def test_many_requests_at_once_keep_their_texts_apart(stack: Stack) -> None:
    stack.engine.replies = [text_reply(f"answer {i}", delay=0.001) for i in range(100)]

    async def one() -> str:
        response = await stack.http.post(CHAT, json={**BODY, "stream": True})
        return parse_frames(response.text).joined("content")

    stack.http.timeout = httpx.Timeout(30)
    answers = await asyncio.gather(*(one() for _ in range(100)))
    assert sorted(answers) == sorted(f"answer {i}" for i in range(100))


async def test_two_gateways_share_engine_and_tokenizer(make_stack: MakeStack) -> None:
    first = await make_stack()
    second = await make_stack(
        engine_address=(first.engine.target,), tokenizer_address=(first.tokenizer.target,)
    )
    answers = await asyncio.gather(first.chat(), second.chat())
    assert [a.status_code for a in answers] == [200, 200]
    assert len(first.engine.requests) == 2
