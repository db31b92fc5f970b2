"""32 requests at once give what each gives alone, through the whole stack."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stack.conftest import Stack

pytestmark = pytest.mark.slow


def prompts() -> list[str]:
    filler = "The red house is near the river. "
    return [f"{filler * (n % 7)}What is {100 + 13 * n} + {5 * n}?" for n in range(32)]


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
