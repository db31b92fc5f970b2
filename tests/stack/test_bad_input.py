"""Whatever a client sends, it gets a 4xx that names the field, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.stack.conftest import Stack

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, "max_tokens": 4, **fields}).encode()


def text(**fields: Any) -> bytes:
    return json.dumps({"prompt": "Hello", "max_tokens": 4, **fields}).encode()


CASES: dict[str, tuple[str, bytes, int, str]] = {
    "malformed JSON": (CHAT, b'{"messages": [', 400, ""),
    "invalid UTF-8": (CHAT, b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, ""),
    "not an object": (CHAT, b"[1, 2]", 400, ""),
    "no messages": (CHAT, b"{}", 400, "messages"),
    "empty messages": (CHAT, chat(messages=[]), 400, "messages"),
    "messages of a wrong type": (CHAT, chat(messages="Hello"), 400, "messages"),
    "unknown role": (CHAT, chat(messages=[{"role": "king", "content": "x"}]), 400, "messages"),
    "unknown model": (CHAT, chat(model="no-such-model"), 404, "model"),
    "temperature of a wrong type": (CHAT, chat(temperature="hot"), 400, "temperature"),
    "temperature out of range": (CHAT, chat(temperature=2.5), 400, "temperature"),
    "temperature below zero": (CHAT, chat(temperature=-1), 400, "temperature"),
    "top_p out of range": (CHAT, chat(top_p=0), 400, "top_p"),
    "top_k out of range": (CHAT, chat(top_k=-2), 400, "top_k"),
    "min_p out of range": (CHAT, chat(min_p=1.5), 400, "min_p"),
    "presence_penalty out of range": (CHAT, chat(presence_penalty=3), 400, "presence_penalty"),
    "repetition_penalty of zero": (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty"),
    "n of zero": (CHAT, chat(n=0), 400, "n"),
    "n beyond the cap": (CHAT, chat(n=100000), 400, "n"),
    "max_tokens of zero": (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    "more tokens than the context": (CHAT, chat(max_tokens=10**9), 400, "max_tokens"),
    "min above max tokens": (CHAT, chat(min_tokens=9), 400, "min_tokens"),
    "empty stop string": (CHAT, chat(stop=[""]), 400, "stop"),
    "seed beyond 64 bits": (CHAT, chat(seed=2**70), 400, "seed"),
    "logit_bias with a word": (CHAT, chat(logit_bias={"cat": 1}), 400, "logit_bias"),
    "logit_bias outside the vocabulary": (CHAT, chat(logit_bias={"9999999": 1}), 400, "logit_bias"),
    "top_logprobs without logprobs": (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    "too many top_logprobs": (CHAT, chat(logprobs=True, top_logprobs=99), 400, "top_logprobs"),
    "stream_options without stream": (
        CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options",
    ),
    "tool_choice without tools": (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    "tool without a name": (CHAT, chat(tools=[{"type": "function", "function": {}}]), 400, "tools"),
    "prompt longer than the context": (
        CHAT, chat(messages=[{"role": "user", "content": "a b " * 20000}]), 400, "messages",
    ),
    "token id outside the vocabulary": (TEXT, text(prompt=[1, 2, 10**7]), 400, "prompt"),
    "negative token id": (TEXT, text(prompt=[-1]), 400, "prompt"),
    "empty prompt": (TEXT, text(prompt=[]), 400, "prompt"),
    "prompt of a wrong type": (TEXT, text(prompt={"a": 1}), 400, "prompt"),
    "suffix": (TEXT, text(suffix="end"), 400, "suffix"),
}  # fmt: skip


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=30) as found:
        yield found


def assert_error(response: httpx.Response, status: int, param: str) -> None:
    assert response.status_code == status, response.text[:500]
    assert len(response.content) < 2048
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["message"]
    if param:
        assert str(error["param"]).split(".")[0].split("[")[0] == param, error


@pytest.mark.parametrize("case", CASES)
def test_wrong_requests_get_a_4xx_that_names_the_field(client: httpx.Client, case: str) -> None:
    path, body, status, param = CASES[case]
    headers = {"content-type": "application/json"}
    assert_error(client.post(path, content=body, headers=headers), status, param)


@pytest.mark.parametrize("stream", [False, True])
def test_a_10_mb_body_is_refused_and_the_server_goes_on(client: httpx.Client, stream: bool) -> None:
    big = chat(messages=[{"role": "user", "content": "x" * 10_000_000}], stream=stream)
    response = client.post(CHAT, content=big, headers={"content-type": "application/json"})
    assert response.status_code in (400, 413)
    assert len(response.content) < 2048
    good = client.post(CHAT, content=chat(), headers={"content-type": "application/json"})
    assert good.status_code == 200


def test_unknown_paths_and_methods_have_the_error_shape(client: httpx.Client) -> None:
    assert_error(client.get("/v1/nothing"), 404, "")
    assert_error(client.get(CHAT), 405, "")


def test_a_body_that_is_not_json_by_its_type_is_refused(client: httpx.Client) -> None:
    assert_error(client.post(CHAT, content=chat(), headers={"content-type": "text/csv"}), 400, "")
