"""Structured output of the trained nano model: forms are kept, forced calls are right."""

from __future__ import annotations

import asyncio
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Literal

import httpx
import pydantic
import pytest

from services.engine.checkpoints.nano.conversation import Conversation
from services.engine.checkpoints.nano.corpus import held_out
from tests.stack.conftest import Stack

pytestmark = pytest.mark.slow
MODEL = "nano-qwen3.8-flash-next"
HOSTILE = "(" * 9 + "a" + "{1,999})" * 9  # takes seconds to compile


class Sum(pydantic.BaseModel):
    answer: int = pydantic.Field(ge=0, le=9999)
    parity: Literal["even", "odd"]


@pytest.mark.parametrize("effort", ["none", "low"])
@pytest.mark.usefixtures("idle")
def test_every_answer_is_an_instance_of_the_model(stack: Stack, effort: str) -> None:
    def ask(number: int) -> Sum | None:
        completion = stack.client().chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": f"What is {number} + 58?"}],
            response_format=Sum,
            temperature=0.8,
            seed=number,
            max_tokens=200,
            extra_body={"reasoning_effort": effort},
        )
        choice = completion.choices[0]
        assert choice.finish_reason == "stop", choice.message.content
        return choice.message.parsed

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(20, 24)))
    assert all(isinstance(answer, Sum) for answer in answers)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.usefixtures("idle")
def test_forced_calls_are_made_and_right(stack: Stack, named: bool) -> None:
    def is_right(conversation: Conversation) -> bool:
        wanted = conversation.messages[-1].calls
        choice: Any = "required"
        if named:
            choice = {"type": "function", "function": {"name": wanted[0].name}}
        tools: Any = conversation.tools
        messages: Any = conversation.openai_messages()[:-1]
        answer = stack.client().chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=tools,
            tool_choice=choice,
            temperature=0,
            max_tokens=300,
            extra_body={"reasoning_effort": conversation.effort},
        )
        message = answer.choices[0].message
        found = [call.to_dict()["function"] for call in message.tool_calls or ()]
        assert found, message
        pairs: list[Any] = [(f["name"], json.loads(f["arguments"])) for f in found]  # type: ignore[index]
        return pairs[:1] == [(call.name, call.arguments) for call in wanted[:1]]

    asked = [c for c in islice(held_out("tools", 23, True), 16) if c.messages[-1].calls][:8]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(is_right, asked))
    assert sum(results) >= 0.9 * len(results), results


@pytest.mark.usefixtures("idle")
def test_completion_follows_a_regular_expression(stack: Stack) -> None:
    body = {"prompt": "Date:", "guided_regex": r" \d{4}-\d{2}", "max_tokens": 30, "n": 3, "seed": 1}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60).json()
    assert all(re.fullmatch(r" \d{4}-\d{2}", c["text"]) for c in answer["choices"]), answer


@pytest.mark.usefixtures("idle")
def test_hostile_schema_is_refused_while_another_request_runs(stack: Stack) -> None:
    level = '{"anyOf":[{"type":"object","required":["a"],"properties":{"a":'
    lists: dict[str, Any] = {"type": "integer"}
    for _ in range(9):
        lists = {"type": "array", "items": lists, "minItems": 1, "maxItems": 999}
    schemas: list[Any] = [
        lists,
        json.loads(level * 150 + "{}" + "}}]}" * 150),
        {"type": "object", "description": "x" * 10_000_000},
        {"$ref": "#/nowhere"},
    ]

    def ask(schema: Any) -> httpx.Response:
        body = {
            "messages": [{"role": "user", "content": "What is 23 + 58?"}],
            "max_tokens": 60,
            "structured_outputs": {"json": schema} if schema else None,
        }
        return httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60)

    with ThreadPoolExecutor(5) as pool:
        results = list(pool.map(ask, [*schemas, None]))
    assert results[-1].status_code == 200
    for answer in (results[0], results[2], results[3]):
        assert answer.status_code == 400, answer.text[:300]
        assert answer.json()["error"]["param"].startswith("structured_outputs")
    assert results[1].status_code in (200, 400)


def schema_of(name: str, width: int = 1) -> dict[str, Any]:
    """An object with `width` required integers."""
    names = [f"{name}_{i}" for i in range(width)]
    return {
        "type": "object",
        "properties": {n: {"type": "integer"} for n in names},
        "required": names,
        "additionalProperties": False,
    }


# 200 in all: schemas that many share, schemas of their own, wide ones, ones that never end.
CROWD: list[tuple[Any, int]] = [
    *(({"json": schema_of(f"shared{n % 4}")}, 200) for n in range(168)),
    *(({"json": schema_of(f"own{n}")}, 200) for n in range(20)),
    *(({"json": schema_of(f"wide{n}", 60)}, 200) for n in range(6)),
    *(({"regex": f"({HOSTILE}){{1,{900 + n}}}"}, 400) for n in range(6)),
]


@pytest.mark.usefixtures("idle")
async def test_nothing_waits_for_a_crowd_of_grammars(stack: Stack) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=stack.url, timeout=60, limits=limits) as http:

        async def ask(form: Any) -> int:
            body = {"prompt": "23 + 58", "max_tokens": 4, "structured_outputs": form}
            return (await http.post("/v1/completions", json=body)).status_code

        random.Random(5).shuffle(CROWD)
        crowd = [asyncio.create_task(ask(form)) for form, _ in CROWD]
        while not any(task.done() for task in crowd):
            await asyncio.sleep(0)
        assert await ask(None) == 200
        assert not all(task.done() for task in crowd)
        assert await asyncio.gather(*crowd) == [status for _, status in CROWD]
