"""LiteLLM's proxy between an SDK and a stack: what comes out behind it is still right."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.stack.conftest import Stack, free_port, wait_until
from tests.stack.test_clients import ANTHROPIC_TOOL, MODEL, SUM, TOOL, WEATHER, last_number, user

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("idle")]

ALIAS = "small"  # the proxy's name for the model
GREEDY: Any = {"model": ALIAS, "temperature": 0}
START_SECONDS = 120  # it imports for 20 s of processor time


class Proxy:
    """A running proxy and the key that it takes."""

    def __init__(self, folder: Path, gateway: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.key = f"sk-{secrets.token_hex(24)}"
        self._log = folder / "proxy.log"
        config = folder / "config.yaml"
        config.write_text(json.dumps(self._config(gateway)))
        port = self.url.rpartition(":")[2]
        command = [sys.executable, "-m", "uvicorn", "litellm.proxy.proxy_server:app"]
        environment = {**os.environ, "CONFIG_FILE_PATH": str(config)}
        environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--port", port], env=environment, cwd=folder, stdout=log, stderr=log
            )

    def _config(self, gateway: str) -> dict[str, Any]:
        target = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{gateway}/v1", "api_key": "none"}
        return {
            "model_list": [{"model_name": ALIAS, "litellm_params": target}],
            "general_settings": {"master_key": self.key},
        }

    def wait(self) -> None:
        """Return when it answers. Raises AssertionError with its log where it ended."""
        wait_until(self._answers, START_SECONDS, "the proxy answers")

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            return httpx.get(f"{self.url}/health/liveliness").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def proxy(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    found = Proxy(tmp_path_factory.mktemp("proxy"), stack.url)
    try:
        found.wait()
        yield found
    finally:
        found.stop()


def test_answer_and_stream_come_through(proxy: Proxy) -> None:
    create: Any = proxy.client().chat.completions.create
    whole = create(messages=user(SUM), **GREEDY)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(create(messages=user(SUM), **options, **GREEDY))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert last_number(whole.choices[0].message.content) == 81
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    (usage,) = [c.usage for c in chunks if c.usage]
    assert usage.completion_tokens == whole.usage.completion_tokens > 0


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tool_is_called_streamed_and_its_result_reported(proxy: Proxy, choice: str) -> None:
    client: Any = proxy.client()
    asked: Any = {"tools": [TOOL], **GREEDY}
    history = user(WEATHER)
    whole = client.chat.completions.create(messages=history, tool_choice=choice, **asked)
    with client.chat.completions.stream(messages=history, tool_choice=choice, **asked) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    for answer in (whole, streamed):
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "get_weather",
            {"city": "Oslo"},
        )
        assert answer.choices[0].finish_reason == "tool_calls"
    message = whole.choices[0].message.model_dump(exclude_none=True)
    call_id = message["tool_calls"][0]["id"]
    result = {"role": "tool", "tool_call_id": call_id, "content": "12 degrees"}
    last = client.chat.completions.create(messages=[*history, message, result], **asked)
    assert "12 degrees" in last.choices[0].message.content


def test_messages_are_translated_both_ways(proxy: Proxy) -> None:
    """Clients of the Anthropic interface, which the proxy turns into chat completions."""
    client = anthropic.Anthropic(base_url=proxy.url, api_key=proxy.key, max_retries=0, timeout=60)
    asked: Any = {"model": ALIAS, "max_tokens": 300, "extra_body": {"temperature": 0}}
    tools: Any = [ANTHROPIC_TOOL]
    answer = client.messages.create(messages=user(WEATHER), tools=tools, **asked)
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert (use.name, use.input, answer.stop_reason) == (
        "get_weather",
        {"city": "Oslo"},
        "tool_use",
    )


def test_errors_keep_their_status(proxy: Proxy) -> None:
    client = proxy.client()
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(messages=user("x" * 1_000_000), **GREEDY)
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(messages=user(SUM), top_p=7, **GREEDY)
