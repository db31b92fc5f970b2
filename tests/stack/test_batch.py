"""32 requests at once give what each gives alone, through the whole stack."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.stack.conftest import Stack, wait_until

pytestmark = pytest.mark.slow


def prompts(least_fillers: int = 0) -> list[str]:
    filler = "The red house is near the river. "
    return [
        f"{filler * (n % 7 + least_fillers)}What is {100 + 13 * n} + {5 * n}?" for n in range(32)
    ]


def ask(stack: Stack, prompt: str) -> tuple[str, int]:
    """Greedy for even ones, seeded sampling for odd ones."""
    odd = len(prompt) % 2
    answer = stack.client().completions.create(
        model="nano-qwen3.8-flash-next", prompt=prompt, max_tokens=24 + len(prompt) % 11,
        temperature=0.9 * odd, seed=len(prompt), logprobs=1,
    )  # fmt: skip
    assert answer.usage is not None
    return answer.choices[0].to_json(), answer.usage.completion_tokens


@pytest.mark.usefixtures("idle")
def test_32_concurrent_requests_equal_each_alone(stack: Stack) -> None:
    alone = [ask(stack, prompt) for prompt in prompts()]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda prompt: ask(stack, prompt), prompts()))
    assert together == alone


@pytest.mark.usefixtures("idle")
def test_32_concurrent_requests_equal_those_before_a_restart_of_the_engine(stack: Stack) -> None:
    asked = prompts(least_fillers=10)
    before = [ask(stack, prompt) for prompt in asked]
    restarts = stack.report()["engine"]["restarts"]
    stack.kill("engine")
    stack.wait_restarted("engine", restarts + 1)
    wait_until(lambda: stack.counters()["sessions"] == 1, 15, "the store is connected")
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda prompt: ask(stack, prompt), asked))
    assert together == before
    wait_until(lambda: store_hits(stack) >= 256, 5, "tokens came from the store")


def store_hits(stack: Stack) -> float:
    """Prompt tokens that this life of the engine has taken from the store."""
    metrics = httpx.get(f"{stack.url}/metrics").text
    values = re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", metrics, re.M)
    return sum(map(float, values))
