"""Chat completions through the real SDK and as raw bytes."""

from __future__ import annotations

import json
import re

import pytest

from tests.gateway.conftest import Stack, until
from tests.gateway.fakes import Reply, text_reply
from tests.gateway.vocabulary import END_THINK, EOS, call, ids

USER = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}


async def test_sdk_reads_a_plain_answer(stack: Stack) -> None:
    answer = await stack.sdk.chat.completions.create(model="fake-model", messages=USER)
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "fake-model"
    assert answer.id.startswith("chatcmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 6)


async def test_sdk_reads_a_streamed_answer(stack: Stack) -> None:
    stream = await stack.sdk.chat.completions.create(
        model="fake-model", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello!"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 6


async def test_body_has_every_field_of_the_interface(stack: Stack) -> None:
    body = (await stack.chat()).json()
    fields = "id object created model system_fingerprint choices usage service_tier"
    assert set(body) == set(fields.split())
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hello!",
                "refusal": None,
                "reasoning": None,
                "reasoning_content": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "created_cache_tokens": 0}


async def test_frames_follow_the_order_role_deltas_finish_usage_done(stack: Stack) -> None:
    stream = await stack.stream(stream_options={"include_usage": True})
    first, *middle, last, usage = stream.frames
    assert first["choices"][0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert all(set(f["choices"][0]["delta"]) == {"content"} for f in middle)
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 14
    assert stream.done
    assert len({(f["id"], f["created"], f["model"], f["object"]) for f in stream.frames}) == 1
    assert not any("usage" in f for f in stream.frames[:-1])


async def test_continuous_usage_counts_up_in_every_frame(stack: Stack) -> None:
    stream = await stack.stream(stream_options={"continuous_usage_stats": True})
    counts = [f["usage"]["completion_tokens"] for f in stream.frames]
    assert counts == sorted(counts) and counts[-1] == 6


@pytest.mark.parametrize("chunk", [1, 3, 1000])
async def test_reasoning_and_content_are_told_apart(stack: Stack, chunk: int) -> None:
    stack.engine.replies = [
        Reply([[*ids("Höm"), END_THINK, *ids("žluťoučký 🐎"), EOS]], chunk=chunk)
    ]
    stream = await stack.stream(reasoning_effort="low")
    assert stream.joined("reasoning") == stream.joined("reasoning_content") == "Höm"
    assert stream.joined("content") == "žluťoučký 🐎"
    for choice in stream.choices[1:]:
        assert set(choice["delta"]) in ({"content"}, {"reasoning", "reasoning_content"}, set())
        assert "\ufffd" not in json.dumps(choice, ensure_ascii=False)
    message = (await stack.chat(reasoning_effort="low")).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Höm", "žluťoučký 🐎")


@pytest.mark.parametrize("chunk", [1, 4, 1000])
async def test_tool_calls_stream_with_one_head_per_call(stack: Stack, chunk: int) -> None:
    tokens = [*call("add", '{"a": 1}'), *call("add", '{"b": "ž"}')]
    stack.engine.replies = [Reply([tokens], chunk=chunk)]
    stream = await stack.stream(tools=[TOOL])
    deltas = [c["delta"]["tool_calls"][0] for c in stream.choices if "tool_calls" in c["delta"]]
    heads = [d for d in deltas if "id" in d]
    assert [(h["index"], h["function"]) for h in heads] == [
        (0, {"name": "add", "arguments": ""}),
        (1, {"name": "add", "arguments": ""}),
    ]
    assert all(re.fullmatch("call_[0-9A-Za-z]{24}", h["id"]) for h in heads)
    assert heads[0]["id"] != heads[1]["id"]
    joined = {
        i: "".join(d["function"]["arguments"] for d in deltas if d["index"] == i) for i in (0, 1)
    }
    assert joined == {0: '{"a": 1}', 1: '{"b": "ž"}'}
    assert stream.finish()["finish_reason"] == "tool_calls"


async def test_tool_calls_in_a_body_leave_content_null(stack: Stack) -> None:
    stack.engine.replies = [Reply([call("add", '{"a": 1}')])]
    answer = await stack.sdk.chat.completions.create(model="", messages=USER, tools=[TOOL])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    sent = stack.tokenizer.openings[0].tools[0]
    assert (sent.name, sent.description, sent.parameters_json) == (
        "add",
        "adds",
        '{"type":"object"}',
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_separate(stack: Stack, stream: bool) -> None:
    stack.engine.replies = [Reply([ids("one"), ids("three"), ids("")])]
    if stream:
        frames = await stack.stream(n=3)
        texts = [frames.joined("content", i) for i in range(3)]
        assert [frames.finish(i)["finish_reason"] for i in range(3)] == ["stop"] * 3
    else:
        body = (await stack.chat(n=3)).json()
        texts = [c["message"]["content"] for c in body["choices"]]
        assert body["usage"]["completion_tokens"] == 8
        assert body["usage"]["prompt_tokens"] == 8
    assert texts == ["one", "three", ""]


async def test_stop_string_ends_the_choice_and_cancels_the_engine(stack: Stack) -> None:
    stack.engine.replies = [text_reply("one STOP two" + "x" * 300, delay=0.01)]
    body = (await stack.chat(stop=["STOP"])).json()
    choice = body["choices"][0]
    assert choice["message"]["content"] == "one "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOP")
    assert body["usage"]["completion_tokens"] == 8
    await until(lambda: stack.engine.cancelled == 1, 5.0)


async def test_stop_string_of_one_choice_leaves_the_others_alone(stack: Stack) -> None:
    stack.engine.replies = [Reply([ids("a STOP b"), ids("longer text, no end")], delay=0.002)]
    body = (await stack.chat(n=2, stop="STOP")).json()
    assert [c["message"]["content"] for c in body["choices"]] == ["a ", "longer text, no end"]
    assert body["usage"]["completion_tokens"] == 6 + 19
    assert (stack.engine.cancelled, stack.engine.completed) == (0, 1)


async def test_stop_token_is_reported_unless_it_is_the_models_own(stack: Stack) -> None:
    stack.engine.replies = [Reply([[*ids("a"), 7]], stop_token=7), Reply([[EOS]], stop_token=EOS)]
    reasons = [(await stack.chat(stop_token_ids=[7])).json()["choices"][0]["stop_reason"]]
    reasons.append((await stack.chat()).json()["choices"][0]["stop_reason"])
    assert reasons == [7, None]


async def test_length_is_reported(stack: Stack) -> None:
    body = (await stack.chat(max_completion_tokens=2, max_tokens=5)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == "He"


async def test_normal_streams_end_without_a_cancelled_call(stack: Stack) -> None:
    for _ in range(20):
        await stack.stream()
    assert (stack.engine.completed, stack.engine.cancelled) == (20, 0)


async def test_cached_tokens_are_reported(stack: Stack) -> None:
    stack.engine.replies = [text_reply("x", cached=5, created=2)]
    usage = (await stack.chat()).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5, "created_cache_tokens": 2}
    assert (usage["prompt_cache_hit_tokens"], usage["prompt_cache_miss_tokens"]) == (5, 3)


async def test_hidden_reasoning_hides_its_tokens_too(stack: Stack) -> None:
    stack.engine.replies = [Reply([[*ids("secret"), END_THINK, *ids("open")]])]
    fields = {
        "reasoning_effort": "low",
        "include_reasoning": False,
        "logprobs": True,
        "return_token_ids": True,
    }
    body = (await stack.chat(**fields)).json()
    assert body["choices"][0]["message"]["content"] == "open"
    assert body["choices"][0]["logprobs"] is None and "token_ids" not in body["choices"][0]
    assert body["usage"]["reasoning_tokens"] == 6
    stream = await stack.stream(**fields)
    assert stream.joined("reasoning") == "" and stream.joined("content") == "open"


async def test_reasoning_can_be_merged_or_held_back(stack: Stack) -> None:
    stack.engine.replies = [Reply([[*ids("think"), END_THINK, *ids("say")]])]
    merged = await stack.stream(reasoning_effort="low", separate_reasoning=False)
    assert merged.joined("content") == "thinksay" and merged.joined("reasoning") == ""
    held = await stack.stream(reasoning_effort="low", stream_reasoning=False)
    pieces = [c["delta"]["reasoning"] for c in held.choices if "reasoning" in c["delta"]]
    assert pieces == ["think"]


async def test_stream_interval_merges_tokens_but_not_the_first(stack: Stack) -> None:
    stack.engine.replies = [text_reply("abcdefghij", delay=0.005)]
    stream = await stack.stream(stream_interval=4)
    pieces = [c["delta"]["content"] for c in stream.choices if c["delta"].get("content")]
    assert pieces == ["a", "bcde", "fghi", "j"]


async def test_token_ids_and_prompt_are_returned_on_request(stack: Stack) -> None:
    fields = {"return_token_ids": True, "return_prompt_text": True}
    body = (await stack.chat(**fields)).json()
    assert body["prompt_token_ids"] == ids("user: Hi") and body["prompt_text"] == "user: Hi"
    assert body["choices"][0]["token_ids"] == ids("Hello!")
    stream = await stack.stream(**fields)
    assert stream.frames[0]["prompt_token_ids"] == ids("user: Hi")
    assert [t for c in stream.choices for t in c.get("token_ids", [])] == ids("Hello!")


async def test_history_reaches_the_renderer_unchanged(stack: Stack) -> None:
    history = [
        {"role": "system", "content": [{"type": "text", "text": "S"}]},
        {"role": "user", "content": "Q"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "R",
            "reasoning_content": "ignored",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": '}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {"b": 1}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    assert (await stack.chat(messages=history)).status_code == 200
    system, user, assistant, tool = stack.tokenizer.renders[0].messages
    assert [p.text for p in system.content] == ["S"] and [p.text for p in user.content] == ["Q"]
    assert assistant.reasoning == "R" and len(assistant.content) == 0
    assert [c.arguments for c in assistant.tool_calls] == ['{"a": ', '{"b":1}']
    assert (tool.tool_call_id, tool.role) == ("c1", "tool")


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({}, None, None),
        ({"reasoning_effort": "none"}, False, "none"),
        ({"reasoning_effort": "ultra"}, True, "max"),
        ({"reasoning_effort": 40}, True, "40"),
        ({"thinking": {"type": "enabled"}}, True, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "adaptive"}}, None, None),
        ({"reasoning": {"enabled": False}}, False, None),
        ({"reasoning": {"effort": "high"}}, True, "high"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            True,
            "low",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            False,
            "low",
        ),
    ],
)
async def test_thinking_is_asked_for_in_many_ways(
    stack: Stack, fields: dict, thinking: bool | None, effort: str | None
) -> None:
    assert (await stack.chat(**fields)).status_code == 200
    sent = stack.tokenizer.renders[0]
    assert (sent.enable_thinking if sent.HasField("enable_thinking") else None) == thinking
    assert (sent.reasoning_effort if sent.HasField("reasoning_effort") else None) == effort
