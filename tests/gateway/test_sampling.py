"""Which parameters reach the engine: request, then checkpoint, then the interface's defaults."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.sampling import ModelFacts, sampling_params
from services.gateway.schema.sampling import SamplingRequest
from tests.gateway.conftest import MakeStack, Stack
from tests.gateway.vocabulary import EOS


def facts(**defaults: Any) -> ModelFacts:
    return ModelFacts("m", "m", "f", 300, 512, defaults, 20)


@pytest.mark.parametrize(
    ("defaults", "fields", "expected"),
    [
        ({}, {}, {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}),
        (
            {"temperature": 0.5, "top_p": 0.25, "top_k": 20},
            {},
            {"temperature": 0.5, "top_p": 0.25, "top_k": 20},
        ),
        ({"temperature": 0.5, "top_k": 20}, {"temperature": 2, "top_k": -1}, {"top_k": 0}),
        ({"top_k": 20}, {"temperature": 0}, {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}),
        ({}, {"temperature": 0.001}, {"temperature": 0.01}),
        ({"repetition_penalty": 1.5}, {}, {"repetition_penalty": 1.5}),
        ({}, {"seed": 7}, {"seed": 7}),
    ],
)
def test_values_come_from_request_then_checkpoint(
    defaults: dict, fields: dict, expected: dict
) -> None:
    params = sampling_params(SamplingRequest(**fields), facts(**defaults))
    assert {name: getattr(params, name) for name in expected} == pytest.approx(expected)


def test_no_seed_is_passed_on_as_none() -> None:
    assert not sampling_params(SamplingRequest(seed=-1), facts()).HasField("seed")
    assert not sampling_params(SamplingRequest(), facts()).HasField("seed")


def test_biases_are_clamped() -> None:
    request = SamplingRequest(logit_bias={"3": 500, "4": -500})
    biases = {b.token_id: b.bias for b in sampling_params(request, facts()).logit_bias}
    assert biases == {3: 100, 4: -100}


async def test_all_fields_reach_the_engine(stack: Stack) -> None:
    response = await stack.chat(
        temperature=0.5,
        presence_penalty=1,
        frequency_penalty=-1,
        min_tokens=3,
        max_tokens=9,
        stop_token_ids=[5],
        ignore_eos=True,
        priority=-4,
        cache_salt="salt",
        allowed_token_ids=[1, 2],
    )
    assert response.status_code == 200
    sent = stack.engine.requests[0]
    assert (sent.sampling.presence_penalty, sent.sampling.frequency_penalty) == (1, -1)
    assert (sent.stopping.min_tokens, sent.stopping.max_tokens) == (3, 9)
    assert list(sent.stopping.stop_token_ids) == [5]
    assert list(sent.stopping.eos_token_ids) == [EOS]
    assert sent.stopping.ignore_eos and sent.priority == -4 and sent.cache_salt == "salt"
    assert list(sent.sampling.allowed_token_ids) == [1, 2] and sent.n == 1


async def test_chat_may_fill_the_whole_context(stack: Stack) -> None:
    await stack.chat()
    assert stack.engine.requests[0].stopping.max_tokens == 512 - 8


async def test_generation_config_is_overridden_by_the_operator(make_stack: MakeStack) -> None:
    stack = await make_stack(
        checkpoint={"temperature": 0.25, "top_k": 5, "max_new_tokens": 100},
        override_generation_config='{"top_k": 7}',
    )
    await stack.chat()
    sent = stack.engine.requests[0]
    assert (sent.sampling.temperature, sent.sampling.top_k) == (0.25, 7)
    assert sent.stopping.max_tokens == 100


async def test_generation_config_can_be_switched_off(make_stack: MakeStack) -> None:
    stack = await make_stack(checkpoint={"top_k": 5}, generation_config="none")
    await stack.chat()
    assert stack.engine.requests[0].sampling.top_k == 0
