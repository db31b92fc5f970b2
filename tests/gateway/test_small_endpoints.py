"""Tokens without generation, and the endpoints that describe engines or act on them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.conftest import Stack, until
from tests.gateway.fakes import text_reply
from tests.gateway.test_bad_input import check_error

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Où?"}]


async def test_tokenize_counts_what_a_chat_completion_sees(stack: Stack) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "reasoning_effort": "low"}
    tokens = (await stack.http.post("/tokenize", json=body)).json()
    completion = (await stack.http.post("/v1/chat/completions", json=body)).json()
    assert tokens["count"] == len(tokens["tokens"]) == completion["usage"]["prompt_tokens"]
    assert (tokens["max_model_len"], tokens["token_strs"]) == (512, None)
    assert bytes(tokens["tokens"]).decode() == "system: Be brief.\nuser: Où?"
    assert stack.tokenizer.renders[0].reasoning_effort == "low"


async def test_tokenize_and_detokenize_are_inverse(stack: Stack) -> None:
    body = {"prompt": "Où?", "return_token_strs": True}
    tokens = (await stack.http.post("/tokenize", json=body)).json()
    assert tokens["token_strs"] == ["O", "\ufffd", "\ufffd", "?"]
    back = await stack.http.post("/detokenize", json={"tokens": tokens["tokens"]})
    assert back.json() == {"prompt": "Où?"}


async def test_render_shows_the_prompt_of_a_chat_and_of_completions(stack: Stack) -> None:
    chat = (
        await stack.http.post("/v1/chat/completions/render", json={"messages": MESSAGES})
    ).json()
    assert chat["prompt_text"] == "system: Be brief.\nuser: Où?"
    assert chat["count"] == len(chat["prompt_token_ids"])
    shown = await stack.http.post("/v1/completions/render", json={"prompt": ["ab", [99]]})
    assert [p["prompt_token_ids"] for p in shown.json()] == [[97, 98], [99]]
    assert stack.engine.requests == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens.1"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/v1/chat/completions/render", {"messages": MESSAGES, "n": 0}, "n"),
        ("/v1/completions/render", {"prompt": []}, "prompt"),
        ("/abort_requests", {"request_ids": 5}, "request_ids"),
    ],
)
async def test_wrong_values_are_named(stack: Stack, path: str, body: Any, param: str) -> None:
    response = await stack.http.post(path, json=body)
    check_error(response, 404 if param == "model" else 400, param)


async def test_a_request_is_aborted_by_the_id_of_its_response(stack: Stack) -> None:
    stack.engine.replies = [text_reply("x" * 400, delay=0.02)]
    headers = {"X-Request-Id": "mine"}
    running = asyncio.create_task(
        stack.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    )
    await until(lambda: stack.engine.running == 1)
    body = {"request_ids": ["cmpl-mine", "unknown"]}
    answer = await stack.http.post("/abort_requests", json=body)
    assert answer.json() == {"aborted": 1}
    (aborted,) = stack.engine.aborted
    assert aborted == stack.engine.requests[0].request_id
    running.cancel()
    await until(lambda: stack.engine.running == 0)
    answer = await stack.http.post("/abort_requests", json=body)
    assert answer.json() == {"aborted": 0}


async def test_engines_are_described(stack: Stack) -> None:
    async def get(path: str) -> Any:
        response: httpx.Response = await stack.http.get(path)
        assert response.status_code == 200
        return response.json()

    assert await get("/load") == {"server_load": 0}
    await until(lambda: stack.app.state.gateway.engines.set.peers[0].load.waiting == 3)
    (load,) = (await get("/v1/loads"))["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["token_usage"]) == (2, 3, 0.25)
    text = (await stack.http.get("/v1/loads?format=prometheus")).text
    gauges = {family.name: family.samples for family in text_string_to_metric_families(text)}
    (sample,) = gauges["sglang:num_waiting_reqs"]
    assert (sample.labels, sample.value) == ({"engine": "0"}, 3)
    assert set(gauges) == {f"sglang:{name}" for name in load} - {"sglang:engine"}
    assert (await get("/server_info"))["engines"][0]["family"] == "fake"
    assert (await get("/get_model_info"))["max_model_len"] == 512
    assert (await stack.http.get("/ready")).status_code == 200


async def test_prefix_caches_are_reset(stack: Stack) -> None:
    for method, path in (("POST", "/reset_prefix_cache"), ("GET", "/flush_cache")):
        answer = await stack.http.request(method, path)
        assert answer.json() == {"success": True, "pages_dropped": 7}


async def test_engines_record_their_steps_on_demand(stack: Stack) -> None:
    error = check_error(await stack.http.post("/start_profile"), 501, None)
    assert error["message"] == "no traces"
    stack.engine.traces = True
    answers = []
    for verb in ("start", "stop"):
        answers.append((await stack.http.post(f"/{verb}_profile")).json())
        assert stack.engine.recording == (verb == "start")
    assert answers == [{"files": []}, {"files": ["a.json.gz"]}]
