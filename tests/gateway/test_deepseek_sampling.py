"""DeepSeek's own sampling equals that of DeepSeek's package, and is there only on request."""

from __future__ import annotations

import itertools
from typing import Any

import deepseek_recipe
import pytest

from tests.gateway.conftest import MakeStack

MODELS = {"deepseek_v4": "DeepSeek-V4-Pro", "deepseek_v41": "DeepSeek-V4.1-Flash"}
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLS: tuple[dict[str, Any], ...] = ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"})
VALUES = ((None, None), (0.0, None), (0.5, 0.5), (0.25, 0.97), (1.5, 1.0))


def official(family: str, fields: dict[str, Any]) -> tuple[float, float]:
    asked = deepseek_recipe.ChatCompletionRequest({"model": MODELS[family], **fields})
    found = asked.convert(deepseek_recipe.ConversionOptions()).inference_options
    return found.temperature, found.top_p


async def test_sampling_is_the_official_one_where_it_is_switched_on(make_stack: MakeStack) -> None:
    stack = await make_stack(deepseek_official_sampling=True)
    info = stack.app.state.gateway.engines.info
    for family, effort, calls, (temperature, top_p) in itertools.product(
        MODELS, ("none", "high"), CALLS, VALUES
    ):
        info.model.family = family
        stack.tokenizer.reasoning_end = None if effort == "none" else 9
        given = {"temperature": temperature, "top_p": top_p}
        fields = {"messages": HI, "reasoning_effort": effort, **calls}
        fields |= {name: value for name, value in given.items() if value is not None}
        assert (await stack.chat(**fields)).status_code == 200
        sent = stack.engine.requests[-1].sampling
        assert (sent.temperature, sent.top_p) == pytest.approx(official(family, fields)), fields


@pytest.mark.parametrize(("on", "family"), [(False, "deepseek_v4"), (True, "glm5_next")])
async def test_sampling_is_the_requests_own_elsewhere(
    make_stack: MakeStack, on: bool, family: str
) -> None:
    stack = await make_stack(deepseek_official_sampling=on)
    stack.app.state.gateway.engines.info.model.family = family
    stack.tokenizer.reasoning_end = 9
    await stack.chat(temperature=0.5, top_p=0.25)
    sent = stack.engine.requests[-1].sampling
    assert (sent.temperature, sent.top_p) == (0.5, 0.25)
