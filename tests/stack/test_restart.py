"""The same prompt after a restart of the engine: cached tokens and the same text."""

from __future__ import annotations

import pytest
from openai.types.chat import ChatCompletion

from tests.stack.conftest import Stack, wait_until

pytestmark = pytest.mark.slow

PASSAGE = " ".join(f"Anna has {n} apples and Ben has {n + 3} pears." for n in range(20, 45))


def ask(stack: Stack, text: str) -> ChatCompletion:
    return stack.client().chat.completions.create(
        model="nano-qwen3.8-flash-next",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=48,
        logprobs=True,
    )


def essence(answer: ChatCompletion) -> tuple[object, ...]:
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    numbers = [(entry.token, entry.logprob) for entry in choice.logprobs.content]
    return choice.message.content, (choice.message.model_extra or {}).get("reasoning"), numbers


def cached(answer: ChatCompletion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.usefixtures("idle")
def test_cold_warm_and_restarted_runs_agree_to_the_last_bit(stack: Stack) -> None:
    prompt = f"{PASSAGE} How many apples does Anna have?"
    cold = ask(stack, prompt)
    warm = ask(stack, prompt)
    assert cached(cold) == 0
    assert cached(warm) >= 64
    restarts = stack.report()["engine"]["restarts"]
    stack.kill("engine")
    stack.wait_restarted("engine", restarts + 1)
    wait_until(lambda: stack.counters()["sessions"] == 1, 15, "the store is connected")
    again = ask(stack, prompt)
    assert cached(again) == cached(warm)
    assert essence(cold) == essence(warm) == essence(again)
