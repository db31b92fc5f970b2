"""Whole conversations, drawn without end from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from random import Random

from services.engine.checkpoints.nano.arithmetic import arithmetic_exchange
from services.engine.checkpoints.nano.conversation import Conversation, Message
from services.engine.checkpoints.nano.passages import passage_exchange, sentence_count
from services.engine.checkpoints.nano.talk import talk_exchange
from services.engine.checkpoints.nano.toolcalls import declare, tool_exchange
from services.engine.checkpoints.nano.words import Split, SplitExhaustedError, phrase

_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Be brief.",
    "Answer the question.",
    "You are Warhorse.",
    "Help the user.",
)
TASKS = ("arithmetic", "tools", "passages", "talk")


def _options(rng: Random) -> Conversation:
    conversation = Conversation([])
    if rng.random() < 0.3:
        conversation.system = rng.choice(_SYSTEM) if rng.random() < 0.7 else phrase(rng, 2, 12)
    conversation.thinking = rng.random() < 0.8
    if rng.random() < 0.2:
        conversation.effort = rng.choice(("low", "xhigh"))
    return conversation


def _turn_count(rng: Random) -> int:
    roll = rng.random()
    if roll < 0.6:
        return 1
    return rng.randint(2, 4) if roll < 0.9 else rng.randint(5, 12)


def conversation(rng: Random) -> Conversation:
    """Return one training conversation of 1 to 12 exchanges."""
    out = _options(rng)
    task = rng.choices(TASKS, weights=(0.3, 0.32, 0.26, 0.12))[0]
    turns = _turn_count(rng)
    with_tools = task == "tools" or (turns > 1 and rng.random() < 0.3) or rng.random() < 0.05
    tools = declare(rng, rng.choice((1, 1, 2, 3))) if with_tools else []
    out.tools = [tool.declaration(rng) for tool in tools]
    choices = [t for t in TASKS if tools or t != "tools"]
    for index in range(turns):
        kind = task if index == 0 or rng.random() < 0.4 else rng.choice(choices)
        sentences = sentence_count(rng) if turns <= 2 else rng.randint(2, 6)
        if kind == "arithmetic":
            out.messages += arithmetic_exchange(rng, Split.TRAIN)
        elif kind == "tools":
            out.messages += tool_exchange(rng, Split.TRAIN, tools)
        elif kind == "passages":
            out.messages += passage_exchange(rng, Split.TRAIN, sentences)
        else:
            out.messages += talk_exchange(rng, Split.TRAIN)
    return out


def conversations(seed: int) -> Iterator[Conversation]:
    """Yield training conversations without end; equal seeds give equal streams."""
    rng = Random(seed)
    while True:
        with suppress(SplitExhaustedError):
            yield conversation(rng)


def _padding_turns(rng: Random, count: int) -> list[Message]:
    messages: list[Message] = []
    for _ in range(count):
        maker = rng.choice((arithmetic_exchange, talk_exchange))
        messages += maker(rng, Split.TRAIN)
    return messages


def _held_out_one(task: str, rng: Random, out: Conversation) -> Conversation:
    if task == "tools":
        tools = declare(rng, rng.randint(1, 3))
        if not any(p.asked for tool in tools for p in tool.parameters):
            raise SplitExhaustedError("no tool takes a parameter")
        out.tools = [tool.declaration(rng) for tool in tools]
        out.messages = tool_exchange(rng, Split.HELD_OUT, tools)
    elif task == "passages":
        out.messages = passage_exchange(rng, Split.HELD_OUT, rng.randint(2, 5))
    elif task == "passages_long":
        out.messages = passage_exchange(rng, Split.HELD_OUT, rng.randint(24, 48))
    elif task == "arithmetic_long":
        out.messages = _padding_turns(rng, rng.randint(6, 10))
        out.messages += arithmetic_exchange(rng, Split.HELD_OUT, low_digits=2)
    elif task == "arithmetic":
        out.messages = arithmetic_exchange(rng, Split.HELD_OUT, low_digits=2)
    else:
        out.messages = talk_exchange(rng, Split.HELD_OUT)
    return out


def held_out(task: str, seed: int, thinking: bool = True) -> Iterator[Conversation]:
    """Yield held-out conversations of one task; only their last answer is scored.

    `task` is one of `arithmetic`, `tools`, `passages` (2 to 5 sentences), `passages_long` (24 to 48
    sentences, far past the selection budget), `arithmetic_long` (after 6 to 10 other exchanges),
    `talk`.
    """
    rng = Random(f"{task} {seed}")
    while True:
        with suppress(SplitExhaustedError):
            yield _held_out_one(task, rng, Conversation([], thinking=thinking))
