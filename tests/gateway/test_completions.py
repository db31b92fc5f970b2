"""Completions: text and token-id prompts, echo, log-probabilities."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from warhorse.v1 import engine_pb2

from tests.gateway.conftest import Stack
from tests.gateway.fakes import Reply, text_reply
from tests.gateway.vocabulary import ids

PATH = "/v1/completions"


async def complete(stack: Stack, **fields: Any) -> httpx.Response:
    return await stack.http.post(PATH, json={"prompt": "Hi", **fields})


def ranked(token: int) -> engine_pb2.TokenLogprob:
    """The token itself on rank 1 and `?` below it."""
    tops = [
        engine_pb2.TopLogprob(token_id=token, logprob=-0.5),
        engine_pb2.TopLogprob(token_id=ord("?"), logprob=-float("inf")),
    ]
    return engine_pb2.TokenLogprob(token_id=token, logprob=-0.5, rank=1, top=tops)


async def test_sdk_completes_a_text(stack: Stack) -> None:
    answer = await stack.sdk.completions.create(model="fake-model", prompt="Hi")
    assert answer.choices[0].text == "Hello!" and answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert stack.tokenizer.openings[0].start_state == 3, "no parsing of reasoning or calls"


async def test_default_length_is_sixteen_tokens(stack: Stack) -> None:
    stack.engine.replies = [text_reply("x" * 40)]
    for fields in ({}, {"max_tokens": None}):
        choice = (await complete(stack, **fields)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("x" * 16, "length")


async def test_sdk_streams_a_completion(stack: Stack) -> None:
    stream = await stack.sdk.completions.create(model="", prompt=ids("Hi"), stream=True)
    chunks = [c async for c in stream]
    assert "".join(c.choices[0].text for c in chunks) == "Hello!"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_frames_have_no_role_and_end_with_usage(stack: Stack) -> None:
    stream = await stack.stream(PATH, stream_options={"include_usage": True})
    assert all("delta" not in c for c in stream.choices) and stream.done
    assert stream.frames[-1]["usage"]["total_tokens"] == 8


async def test_prompts_are_numbered_before_choices(stack: Stack) -> None:
    stack.engine.replies = [Reply([ids("a"), ids("b")])]
    body = (await complete(stack, prompt=["one", ids("two"), "three"], n=2)).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "a"), (1, "b"), (2, "a"), (3, "b"), (4, "a"), (5, "b"),
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == 3 + 3 + 5
    assert body["usage"]["completion_tokens"] == 6
    stream = await stack.stream(PATH, prompt=["one", "two"], n=2)
    assert sorted(c["index"] for c in stream.choices if c["finish_reason"]) == [0, 1, 2, 3]


async def test_echo_puts_the_prompt_in_front(stack: Stack) -> None:
    for prompt in ("Grüß", ids("Grüß")):
        body = (await complete(stack, prompt=prompt, echo=True)).json()
        assert body["choices"][0]["text"] == "GrüßHello!"
    stream = await stack.stream(PATH, prompt="Grüß", echo=True)
    assert "".join(c["text"] for c in stream.choices) == "GrüßHello!"


@pytest.mark.parametrize("echo", [False, True])
async def test_a_character_cut_by_the_prompts_end_is_completed_once(
    stack: Stack, echo: bool
) -> None:
    euro = ids("€")
    stack.engine.replies = [Reply([[euro[2], *ids("5")]])]
    stream = await stack.stream(PATH, prompt=[*ids("cost "), *euro[:2]], echo=echo)
    assert "".join(c["text"] for c in stream.choices) == ("cost €5" if echo else "€5")


async def test_logprobs_have_offsets_and_names(stack: Stack) -> None:
    stack.engine.replies = [text_reply("ab", logprob=ranked)]
    for stream in (False, True):
        if stream:
            frames = await stack.stream(PATH, logprobs=1)
            parts = [c["logprobs"] for c in frames.choices if c["logprobs"]]
            merged = {key: [x for p in parts for x in p[key]] for key in parts[0]}
        else:
            merged = (await complete(stack, logprobs=1)).json()["choices"][0]["logprobs"]
        assert merged == {
            "tokens": ["a", "b"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [{"a": -0.5, "?": -9999.0}, {"b": -0.5, "?": -9999.0}],
            "text_offset": [0, 1],
        }


async def test_echo_with_logprobs_scores_the_prompt(stack: Stack) -> None:
    stack.engine.replies = [text_reply("", logprob=ranked)]
    body = (await complete(stack, prompt="añb", echo=True, logprobs=0, max_tokens=0)).json()
    logprobs = body["choices"][0]["logprobs"]
    assert body["choices"][0]["text"] == "añb"
    assert logprobs["tokens"][0] == "a" and len(logprobs["tokens"]) == 4
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert stack.engine.requests[0].stopping.max_tokens == 0
    assert stack.engine.requests[0].output.prompt_logprobs == 0


async def test_tokens_can_be_named_by_id(stack: Stack) -> None:
    stack.engine.replies = [text_reply("a", logprob=ranked)]
    body = (await complete(stack, logprobs=0, return_tokens_as_token_ids=True)).json()
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:97"]


async def test_chat_logprobs_carry_bytes(stack: Stack) -> None:
    stack.engine.replies = [text_reply("é", logprob=ranked)]
    body = (await stack.chat(logprobs=True, top_logprobs=2)).json()
    first, second = body["choices"][0]["logprobs"]["content"]
    assert (first["bytes"], second["bytes"]) == ([0xC3], [0xA9])
    assert [t["logprob"] for t in first["top_logprobs"]] == [-0.5, -9999.0]
    stream = await stack.stream(logprobs=True)
    entries = [e for c in stream.choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert [e["bytes"] for e in entries] == [[0xC3], [0xA9]]


LISTED = {"logprob_token_ids": [ord("?"), ord("é"), ord("?")]}


async def test_named_tokens_take_the_place_of_the_likely_ones(stack: Stack) -> None:
    stack.engine.replies = [text_reply("a", logprob=ranked)]
    chat = (await stack.chat(logprobs=True, top_logprobs=5, **LISTED)).json()
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    assert [t["token"] for t in entry["top_logprobs"]] == ["a", "?"]
    text = (await complete(stack, logprobs=0, **LISTED)).json()
    assert text["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "?": -9999.0}]
    for request in stack.engine.requests:
        assert list(request.output.logprob_token_ids) == [ord("?"), ord("é")]


async def test_token_bytes_are_asked_for_once(stack: Stack) -> None:
    stack.engine.replies = [text_reply("aaaa", logprob=ranked)]
    for _ in range(3):
        await complete(stack, logprobs=1)
    assert stack.tokenizer.decodes == 1


async def test_prompt_logprobs_start_with_null(stack: Stack) -> None:
    stack.engine.replies = [text_reply("x", logprob=ranked)]
    choice = (await complete(stack, prompt="ab", prompt_logprobs=1)).json()["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "63": {"logprob": -9999.0, "rank": 2, "decoded_token": "?"},
        },
    ]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "def"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 99}, "abcdef"),
        ({"truncate_prompt_tokens": -1}, "abcdef"),
    ],
)
async def test_prompts_are_truncated_on_request(stack: Stack, fields: dict, kept: str) -> None:
    body = (await complete(stack, prompt="abcdef", echo=True, **fields)).json()
    assert body["choices"][0]["text"] == kept + "Hello!"
    assert body["usage"]["prompt_tokens"] == len(kept)
