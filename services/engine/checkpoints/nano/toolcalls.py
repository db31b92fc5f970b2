"""Exchanges that call a declared tool and report its result."""

from __future__ import annotations

import json
from random import Random

from services.engine.checkpoints.nano.conversation import Call, Message
from services.engine.checkpoints.nano.toolbox import Tool, Value, any_tool
from services.engine.checkpoints.nano.words import CITIES, Split, draw, name, number, phrase, word


def declare(rng: Random, count: int) -> list[Tool]:
    """Return `count` tools with distinct names."""
    tools: list[Tool] = []
    while len(tools) < count:
        tool = any_tool(rng)
        if all(tool.name != other.name for other in tools):
            tools.append(tool)
    return tools


def _shown(value: Value) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _ask(rng: Random, split: Split, tool: Tool) -> tuple[str, Call]:
    """Return a question and the call that answers it; the argument list decides the split."""
    asked = [p for p in tool.parameters if p.asked]
    arguments = draw(
        split if asked else Split.TRAIN,
        lambda: {p.name: p.draw(rng) for p in asked},
        lambda item: ("tool", tool.name, *item.values()) if item else ("tool", "none"),
    )
    question = rng.choice(tool.questions)
    for key, value in arguments.items():
        question = question.replace("{" + key + "}", _shown(value))
    return question, Call(tool.name, arguments)


def result_text(rng: Random) -> str:
    """Return what a tool answered: a word, a number, a phrase or a small JSON object."""
    kind = rng.randrange(5)
    if kind == 0:
        return str(number(rng, 4))
    if kind == 1:
        return phrase(rng, 1, 6)
    if kind == 2:
        return f"{number(rng, 3)} {rng.choice(('degrees', 'euros', 'items', 'percent', 'km'))}"
    if kind == 3:
        return json.dumps({word(rng): number(rng, 3), word(rng): name(rng, CITIES)})
    return f"{name(rng, CITIES)}: {phrase(rng, 1, 3)}, {number(rng, 2)} degrees"


def _call_message(calls: tuple[Call, ...]) -> Message:
    names = " and ".join(call.name for call in calls)
    return Message("assistant", calls=calls, reasoning=f"I call {names}.")


def tool_exchange(rng: Random, split: Split, tools: list[Tool]) -> list[Message]:
    """Return a question for one of `tools`, the call and, at times, result and final answer."""
    askable = [t for t in tools if any(p.asked for p in t.parameters) or split is Split.TRAIN]
    question, call = _ask(rng, split, rng.choice(askable))
    calls: tuple[Call, ...] = (call,)
    if split is Split.TRAIN and rng.random() < 0.1:
        second, other = _ask(rng, split, rng.choice(askable))
        question, calls = f"{question}\n{second}", (call, other)
    messages = [Message("user", question), _call_message(calls)]
    if split is Split.TRAIN and rng.random() < 0.5:
        results = [result_text(rng) for _ in calls]
        messages += [Message("tool", text) for text in results]
        messages.append(
            Message("assistant", f"Result: {' and '.join(results)}", reasoning="The tool answered.")
        )
    return messages
