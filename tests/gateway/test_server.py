"""Models, health, metrics, keys, CORS, request ids, unknown paths, start and stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.gateway.conftest import MakeStack, Stack, until
from tests.gateway.fakes import FakeEngine, FakeTokenizer, Reply, text_reply
from tests.gateway.sse import parse_frames
from tests.gateway.test_bad_input import check_error
from tests.gateway.vocabulary import call


async def test_models_are_listed_and_found(stack: Stack) -> None:
    cards = [m async for m in stack.sdk.models.list()]
    assert [c.id for c in cards] == ["fake-model"]
    card = (await stack.http.get("/v1/models/fake-model")).json()
    assert (card["max_model_len"], card["context_length"], card["root"]) == (512, 512, "fake-model")
    check_error(await stack.http.get("/v1/models/other"), 404, "model")


async def test_served_names_replace_the_models_own(make_stack: MakeStack) -> None:
    stack = await make_stack(served_model_name=("org/first", "second"))
    cards = (await stack.http.get("/v1/models")).json()["data"]
    assert [(c["id"], c["root"]) for c in cards] == [
        ("org/first", "fake-model"),
        ("second", "fake-model"),
    ]
    assert (await stack.http.get("/v1/models/org/first")).status_code == 200
    for asked in ("org/first", "second", "", None):
        body = (await stack.chat(model=asked)).json()
        assert body["model"] == "org/first"
    check_error(await stack.chat(model="fake-model"), 404, "model")


async def test_paths_and_methods_that_do_not_exist(stack: Stack) -> None:
    assert "/v1/nope" in check_error(await stack.http.get("/v1/nope"), 404, None)["message"]
    check_error(await stack.http.post("/v1/embeddings", json={}), 404, None)
    response = await stack.http.get("/v1/chat/completions")
    assert "GET" in check_error(response, 405, None)["message"]
    assert response.headers["allow"] == "POST"


async def test_small_endpoints(stack: Stack) -> None:
    assert (await stack.http.get("/")).json() == {"status": "ok"}
    assert set((await stack.http.get("/version")).json()) == {"version"}
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        response = await stack.http.request(method, path)
        assert (response.status_code, response.content) == (200, b"")
    schema = (await stack.http.get("/openapi.json")).json()
    assert "/v1/chat/completions" in schema["paths"]


async def test_health_follows_engine_and_tokenizer(stack: Stack) -> None:
    for peer in (stack.engine, stack.tokenizer):
        await peer.set_serving(False)
        await until(lambda: not stack.app.state.gateway.healthy)
        assert (await stack.http.get("/health")).status_code == 503
        await peer.set_serving(True)
        await until(lambda: stack.app.state.gateway.healthy)
        assert (await stack.http.get("/health")).status_code == 200


async def test_keys_are_asked_for_where_it_matters(make_stack: MakeStack) -> None:
    stack = await make_stack(api_key=("secret", "other"))
    error = check_error(await stack.chat(), 401, None)
    assert error["type"] == "authentication_error"
    for headers, status in (
        ({"Authorization": "Bearer secret"}, 200),
        ({"Authorization": "bearer other"}, 200),
        ({"X-Api-Key": "secret"}, 200),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"X-Api-Key": ""}, 401),
    ):
        response = await stack.http.get("/v1/models", headers=headers)
        assert response.status_code == status, headers
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert (await stack.http.get(path)).status_code == 200


async def test_browsers_may_call_from_allowed_origins(make_stack: MakeStack) -> None:
    stack = await make_stack(allowed_origins=("https://a.example",), api_key=("k",))
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    preflight = await stack.http.options("/v1/chat/completions", headers=headers)
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    headers["Origin"] = "https://b.example"
    refused = await stack.http.options("/v1/chat/completions", headers=headers)
    assert "access-control-allow-origin" not in refused.headers


async def test_request_ids_come_from_the_client(make_stack: MakeStack) -> None:
    stack = await make_stack(enable_request_id_headers=True)
    body = {"messages": [{"role": "user", "content": "x"}], "request_id": "from-body"}
    for headers, expected in (
        ({"X-Request-Id": "from-header"}, "chatcmpl-from-header"),
        ({}, "chatcmpl-from-body"),
        ({"X-Request-Id": "not usable"}, "chatcmpl-from-body"),
    ):
        response = await stack.http.post("/v1/chat/completions", json=body, headers=headers)
        assert response.json()["id"] == expected
    assert response.headers["x-request-id"]
    longest = "x" * 256
    await stack.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": longest})
    engine_ids = [r.request_id for r in stack.engine.requests]
    assert len(set(engine_ids)) == 4, "ids at the engine are unique"
    assert max(map(len, engine_ids)) <= 256


def sample(text: str, name: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith(name)]
    assert len(lines) == 1, (name, lines)
    return float(lines[0].rsplit(" ", 1)[1])


async def test_metrics_speak_the_names_of_dashboards(stack: Stack) -> None:
    stack.engine.replies = [text_reply("Hello!", cached=5)]
    await stack.chat()
    await stack.stream()
    stack.engine.replies = [Reply([call("f", "{}")])]
    await stack.chat(n=2)
    await stack.chat(temperature=9)
    response = await stack.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    text = response.text
    labels = '{engine="0",model_name="fake-model"'
    expected = {
        f"vllm:num_requests_running{labels}": 2,
        f"vllm:num_requests_waiting{labels}": 3,
        f"vllm:kv_cache_usage_perc{labels}": 0.25,
        f"vllm:num_preemptions_total{labels}": 4,
        f"vllm:prompt_tokens_total{labels}": 24,
        f"vllm:prompt_tokens_cached_total{labels}": 10,
        f"vllm:generation_tokens_total{labels}": 12 + 2 * len(call("f", "{}")),
        f"vllm:time_to_first_token_seconds_count{labels}": 3,
        f"vllm:inter_token_latency_seconds_count{labels}": None,
        f"vllm:e2e_request_latency_seconds_count{labels}": 3,
        f'vllm:request_success_total{{engine="0",finished_reason="stop",{labels[12:]}': 4,
        f"vllm:request_params_n_sum{labels}": 4,
        f'vllm:num_requests_waiting_by_reason{labels},reason="capacity"': 3,
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{labels},position="0"': 9,
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{labels},position="1"': 4,
        f'vllm:engine_sleep_state{labels},sleep_state="awake"': 1,
        'http_requests_total{handler="/v1/chat/completions",method="POST",status="200"}': 3,
        'http_requests_total{handler="/v1/chat/completions",method="POST",status="400"}': 1,
    }
    for name, value in expected.items():
        assert value is None or sample(text, name) == pytest.approx(value), name


async def test_unknown_paths_do_not_add_series(stack: Stack) -> None:
    for i in range(5):
        await stack.http.get(f"/v1/path{i}")
        await stack.http.request(f"METHOD{i}", "/v1/models")
    text = (await stack.http.get("/metrics")).text
    assert sample(text, 'http_requests_total{handler="other",method="GET",status="404"}') == 5
    assert "path0" not in text and "METHOD" not in text


async def test_process_serves_and_drains_on_sigterm() -> None:
    """The command line, its environment variables, and a stream that outlives SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="wh-") as folder:
        run = Path(folder)
        for service in ("engine", "tokenizer"):
            (run / service).mkdir()
        engine = FakeEngine(run / "engine" / "engine-0.sock")
        tokenizer = FakeTokenizer(run / "tokenizer" / "tokenizer-0.sock")
        engine.replies = [text_reply("slow text", delay=0.1)]
        await engine.start()
        await tokenizer.start()
        process = subprocess.Popen(
            [sys.executable, "-m", "services.gateway", "--host", "127.0.0.1", "--port", "0"],
            env={**os.environ, "WARHORSE_RUN_DIR": folder, "PYTHONPATH": ".:protos"},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            url = await asyncio.to_thread(_url_of, process)
            async with httpx.AsyncClient(base_url=url, timeout=10) as http:
                await _until_healthy(http)
                body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
                request = asyncio.create_task(http.post("/v1/chat/completions", json=body))
                await until(lambda: engine.running == 1)
                process.send_signal(signal.SIGTERM)
                frames = parse_frames((await request).text)
            assert frames.joined("content") == "slow text" and frames.done
            assert await asyncio.to_thread(process.wait, 10) == 0
        finally:
            process.kill()
            process.wait()
            await engine.kill()
            await tokenizer.kill()


def _url_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if "listening on " in line:
            return line.split("listening on ")[1].split('"')[0]
    raise AssertionError("the gateway did not start")


async def _until_healthy(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(10):
        while (await http.get("/health")).status_code != 200:
            await asyncio.sleep(0.05)
