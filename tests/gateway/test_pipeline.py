"""The gateway with the real tokenizer and the real engine front, which plays a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest

from tests.gateway.pipeline import Pipeline, running_pipeline
from tests.gateway.sse import Frames, parse_frames
from tests.tokenizer.support import reference

LONG = "Příliš žluťoučký kůň 🐎 úpěl ďábelské ódy. " * 20
CALL = (
    "I look.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nŽďár\n</parameter>"
    "\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call><|im_end|>"
)
CUT = reference().encode("€").ids
assert len(CUT) == 3, "the tokenizer spells this character in bytes"


def token_ids(text: str) -> list[int]:
    return reference().encode(text).ids


NOVEL = 3000  # tokens: several windows of the engine's shared call

SCRIPT = [
    {"when": {"prompt_contains": "novel"}, "token_ids": token_ids("a") * NOVEL},
    {"when": {"prompt_contains": "cost"}, "token_ids": [CUT[-1], *token_ids("!")]},
    {"when": {"prompt_contains": "weather"}, "text": CALL},
    {"when": {"prompt_contains": "burst"}, "text": CALL, "chunk": 1000},
    {"when": {"prompt_contains": "slow"}, "text": LONG, "delay_ms": 5},
    {"when": {"prompt_contains": "long"}, "text": LONG, "finish_reason": "length"},
    {"when": {}, "text": "Thinking.\n</think>\n\nIt is 81 🐎!<|im_end|>"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with running_pipeline(SCRIPT) as running:
        yield running


@pytest.fixture
async def http(pipeline: Pipeline) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=pipeline.url, timeout=20) as client:
        yield client


def ask(text: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **fields}


async def stream(http: httpx.AsyncClient, text: str, **fields: object) -> Frames:
    body = ask(text, stream=True, **fields)
    return parse_frames((await http.post("/v1/chat/completions", json=body)).text)


async def test_reasoning_and_answer_are_told_apart(pipeline: Pipeline) -> None:
    async with openai.AsyncOpenAI(base_url=f"{pipeline.url}/v1", api_key="-") as sdk:
        answer = await sdk.chat.completions.create(**ask("What is 23 + 58?", model="scripted"))
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("It is 81 🐎!", "Thinking.")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("question", ["weather", "burst"])
async def test_tool_calls_are_equal_streamed_and_whole(
    http: httpx.AsyncClient, question: str
) -> None:
    frames = await stream(http, question, tools=TOOLS)
    calls = [c["delta"]["tool_calls"][0] for c in frames.choices if "tool_calls" in c["delta"]]
    arguments = "".join(c["function"]["arguments"] for c in calls)
    assert json.loads(arguments) == {"city": "Žďár", "days": 3}
    assert frames.joined("reasoning") == "I look."
    assert frames.finish()["finish_reason"] == "tool_calls"
    body = (await http.post("/v1/chat/completions", json=ask(question, tools=TOOLS))).json()
    whole = body["choices"][0]["message"]
    assert whole["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": arguments}
    assert whole["content"] is None and whole["reasoning"] == "I look."


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_k": 5},
        {"temperature": 0.001, "min_p": 0.5, "seed": -(2**63), "max_tokens": 3},
        {"n": 2, "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.5},
        {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [1], "max_tokens": 4},
        {"logit_bias": {"3": 100}, "allowed_token_ids": [1, 2, 3], "priority": -1},
        {"logprobs": True, "top_logprobs": 20, "logprob_token_ids": [3, 4]},
        {"cache_salt": "s", "top_p": 0.5, "stream_interval": 3, "truncate_prompt_tokens": 5},
    ],
)
async def test_what_the_gateway_accepts_the_engine_accepts(
    http: httpx.AsyncClient, fields: dict[str, object]
) -> None:
    answer = await http.post("/v1/chat/completions", json=ask("Hi", **fields))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("choices", [1, 2])
async def test_an_answer_longer_than_the_windows_comes_whole(
    http: httpx.AsyncClient, choices: int
) -> None:
    fields = {"n": choices, "stream_interval": 700, "max_tokens": NOVEL}
    fields["chat_template_kwargs"] = {"enable_thinking": False}
    frames = await stream(http, "novel", **fields)
    for index in range(choices):
        deltas = [c["delta"] for c in frames.choices if c["index"] == index]
        assert "".join(d.get("content") or "" for d in deltas) == "a" * NOVEL


async def test_no_broken_character_shows_in_a_stream(http: httpx.AsyncClient) -> None:
    frames = await stream(http, "long", chat_template_kwargs={"enable_thinking": False})
    assert frames.joined("content") == LONG
    assert not any("\ufffd" in (c["delta"].get("content") or "") for c in frames.choices)


async def test_stop_strings_cut_the_text_and_the_count(http: httpx.AsyncClient) -> None:
    body = ask("long", stop=["úpěl"], chat_template_kwargs={"enable_thinking": False})
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "Příliš žluťoučký kůň 🐎 "
    assert choice["stop_reason"] == "úpěl"
    assert answer["usage"]["completion_tokens"] < 60


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("as_stream", [False, True])
async def test_a_character_cut_by_the_prompts_end_is_completed_once(
    http: httpx.AsyncClient, echo: bool, as_stream: bool
) -> None:
    prompt = [*token_ids("cost "), *CUT[:-1]]
    body = {"prompt": prompt, "echo": echo, "stream": as_stream}
    answer = await http.post("/v1/completions", json=body)
    if as_stream:
        texts = [c["text"] for c in parse_frames(answer.text).choices]
    else:
        texts = [answer.json()["choices"][0]["text"]]
    assert "".join(texts) == ("cost €!" if echo else "€!")


async def test_bad_templates_and_long_prompts_are_refused(http: httpx.AsyncClient) -> None:
    only_system = {"messages": [{"role": "system", "content": "x"}]}
    refused = await http.post("/v1/chat/completions", json=only_system)
    assert refused.status_code == 400, refused.text
    long = await http.post("/v1/chat/completions", json=ask("ž" * 10_000))
    assert long.status_code == 400
    assert "maximum context length" in long.json()["error"]["message"]


async def test_a_client_that_leaves_frees_the_engine(http: httpx.AsyncClient) -> None:
    request = asyncio.create_task(stream(http, "slow"))
    await until_running(http, 1)
    request.cancel()
    await until_running(http, 0)


async def test_the_tokenizer_may_be_killed_in_mid_stream(
    pipeline: Pipeline, http: httpx.AsyncClient
) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    request = asyncio.create_task(stream(http, "slow", **fields))
    await until_running(http, 1)
    await asyncio.sleep(0.5)
    pipeline.tokenizer.kill()
    await asyncio.to_thread(pipeline.tokenizer.start)
    frames = await asyncio.wait_for(request, 10)
    assert frames.joined("content") == LONG and frames.done


async def until_running(http: httpx.AsyncClient, count: int, seconds: float = 5.0) -> None:
    """Until the engine reports `count` running requests."""
    line = f'vllm:num_requests_running{{engine="0",model_name="scripted"}} {count}.0'
    async with asyncio.timeout(seconds):
        while line not in (await http.get("/metrics")).text:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("spaces", [True, False])
async def test_no_spaces_come_between_special_tokens(http: httpx.AsyncClient, spaces: bool) -> None:
    body = {
        "prompt": "burst",
        "max_tokens": 500,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": spaces,
    }
    choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["text"] == CALL.removesuffix("<|im_end|>")
