"""kill -9 of each process in mid-stream: nothing hangs, everything comes back."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import openai
import pytest

from tests.stack.conftest import SERVICES, Stack, wait_until

pytestmark = pytest.mark.slow

LONG = {
    "model": "nano-qwen3.8-flash-next",
    "messages": [{"role": "user", "content": "What is 123 + 456?"}],
    "temperature": 0,
    "max_tokens": 400,
    "extra_body": {"ignore_eos": True},
}


@dataclass
class Reading:
    """One stream, read in a thread of its own."""

    stack: Stack
    text: str = ""
    error: Exception | None = None
    finished: bool = False
    ended_at: float = 0.0
    started: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            for chunk in self.stack.client().chat.completions.create(stream=True, **LONG):  # type: ignore[call-overload]
                for choice in chunk.choices:
                    extra = choice.delta.model_extra or {}
                    self.text += extra.get("reasoning_content") or choice.delta.content or ""
                    self.finished |= choice.finish_reason is not None
                if len(self.text) > 20:
                    self.started.set()
        except Exception as error:
            self.error = error
        self.ended_at = time.monotonic()
        self.started.set()


def whole_text(stack: Stack) -> str:
    reading = Reading(stack)
    reading.run()
    assert reading.error is None
    assert reading.finished
    return reading.text


def check_back(stack: Stack, service: str, restarts: int, right: str) -> None:
    """The killed process is there again, with what others hold of it, and answers are right."""
    stack.wait_restarted(service, restarts)
    wait_until(lambda: all(row["healthy"] for row in stack.report().values()), 20, "all healthy")
    assert whole_text(stack) == right


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.usefixtures("idle")
def test_a_killed_process_ends_or_completes_the_stream_and_comes_back(
    stack: Stack, service: str
) -> None:
    right = whole_text(stack)
    restarts = stack.report()[service]["restarts"]
    reading = Reading(stack)
    thread = threading.Thread(target=reading.run)
    thread.start()
    assert reading.started.wait(20)
    assert reading.error is None
    stack.kill(service)
    killed_at = time.monotonic()
    thread.join(30)
    assert not thread.is_alive()
    if reading.error is None:
        assert reading.finished
        assert reading.text == right
    else:
        assert isinstance(reading.error, openai.APIError)
        assert reading.ended_at - killed_at < 10
        assert right.startswith(reading.text)
    check_back(stack, service, restarts + 1, right)


@pytest.mark.parametrize("service", ["tokenizer", "kvcache", "offload"])
@pytest.mark.usefixtures("idle")
def test_a_stream_survives_the_death_of_what_it_can_do_without(stack: Stack, service: str) -> None:
    right = whole_text(stack)
    restarts = stack.report()[service]["restarts"]
    reading = Reading(stack)
    thread = threading.Thread(target=reading.run)
    thread.start()
    assert reading.started.wait(20)
    stack.kill(service)
    thread.join(30)
    assert reading.error is None
    assert reading.text == right
    check_back(stack, service, restarts + 1, right)


@pytest.mark.usefixtures("idle")
def test_a_client_that_goes_away_frees_the_engine_at_once(stack: Stack) -> None:
    stream = stack.client().chat.completions.create(stream=True, **LONG)  # type: ignore[call-overload]
    next(iter(stream))
    wait_until(lambda: stack.counters()["running"] == 1, 5, "one request runs")
    stream.response.close()
    wait_until(lambda: stack.counters()["running"] == 0, 3, "nothing runs")
