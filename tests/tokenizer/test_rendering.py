"""Prompts of the family, by its built-in format and by the template of the nano checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.rendering import pool as pool_module
from services.tokenizer.rendering.conversation import Conversation, Message, PastCall
from services.tokenizer.rendering.pool import RenderError, RenderLimits, RenderPool
from services.tokenizer.rendering.rules import QwenRules
from services.tokenizer.rendering.template import ChatTemplate, TemplateRenderer
from tests.service_process import ROOT
from tests.tokenizer.support import reference, vocabulary

TEMPLATES = {
    "built-in": Path(pool_module.__file__).parent / "chatml.jinja",
    "nano": ROOT / "services/engine/checkpoints/nano/chat_template.jinja",
}
USER = Message("user", ("Hi",))
START = "<|im_start|>assistant\n<think>\n"
CALL = PastCall("c", "get_temp", '{"city": "Oslo", "days": 2}')


@pytest.fixture
async def pool() -> AsyncIterator[RenderPool]:
    pool = RenderPool(RenderLimits(seconds=2), 1)
    yield pool
    await pool.close()


@pytest.fixture(params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    return ChatTemplate.of(TEMPLATES[request.param].read_text("utf-8"))


def conversation(*messages: Message, **fields: Any) -> Conversation:
    return Conversation(messages, **{"effort": "medium", **fields})


CASES = {
    "one message": (
        conversation(USER),
        f"<|im_start|>user\nHi<|im_end|>\n{START}",
    ),
    "thinking off, system": (
        conversation(Message("system", ("S",)), USER, effort=None, enable_thinking=False),
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "call and result": (
        conversation(
            Message("user", ("temp?",)),
            Message("assistant", ("Let me look.",), reasoning="need tool", calls=(CALL,)),
            Message("tool", ("5\n",), call_id="c"),
        ),
        "<|im_start|>user\ntemp?<|im_end|>\n<|im_start|>assistant\n<think>\nneed tool\n</think>"
        "\n\nLet me look.\n\n<tool_call>\n<function=get_temp>\n<parameter=city>\nOslo\n"
        "</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n{START}",
    ),
    "thinking of earlier turns left out": (
        conversation(
            Message("user", ("q1",)),
            Message("assistant", ("a1",), reasoning="r1"),
            Message("user", ("q2",)),
            arguments={"preserve_thinking": False},
        ),
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
        f"<|im_start|>user\nq2<|im_end|>\n{START}",
    ),
    "no generation prompt": (
        conversation(USER, Message("assistant", ("a",)), add_generation_prompt=False),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\na<|im_end|>\n",
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_prompt_of_the_family(pool: RenderPool, template: ChatTemplate, name: str) -> None:
    asked, text = CASES[name]
    prompt = await TemplateRenderer(vocabulary(), QwenRules(), {}, template, pool).render(asked)
    assert prompt.text == text
    library = reference().encode(text, add_special_tokens=False).ids
    assert vocabulary().encode_segments(prompt.segments) == library


async def test_rendering_that_was_given_up_leaves_the_worker_usable(pool: RenderPool) -> None:
    assert await pool.render("{{ x }}", {"x": "warm"}) == "warm"
    loop = "{% for a in range(3000) %}{% for b in range(300) %}{% endfor %}{% endfor %}{{ x }}"
    given_up = asyncio.create_task(pool.render(loop, {"x": "slow"}))
    await asyncio.sleep(0.02)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert await pool.render("{{ x }}", {"x": "next"}) == "next"


async def test_endless_rendering_is_ended_and_the_next_one_served(pool: RenderPool) -> None:
    endless = "{{ ('a' * 3000000) | replace('a', 'b') | wordwrap(1) | length }}" * 50
    with pytest.raises(RenderError, match="took more than 2 s"):
        await pool.render(endless, {})
    assert await pool.render("fine", {}) == "fine"
