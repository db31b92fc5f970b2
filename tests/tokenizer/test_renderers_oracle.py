"""The built-in formats of GLM and Qwen equal those of an independent package, token for token.

The package is `renderers`. Its words about tools and efforts are the checkpoints' and not ours, so
tools are left out, and for Qwen the effort is the one without a text.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from renderers.configs import GLM53RendererConfig, Qwen38RendererConfig
from renderers.glm5 import GLM53Renderer
from renderers.qwen38 import Qwen38Renderer
from tokenizers import Tokenizer

from services.tokenizer.families import FAMILIES
from services.tokenizer.rendering.conversation import Conversation, Message, PastCall
from services.tokenizer.rendering.pool import RenderPool
from services.tokenizer.rendering.template import ChatTemplate, TemplateRenderer
from services.tokenizer.rendering.worker import answer
from services.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.support import (
    GLM_RESPONSE,
    GLM_SPECIAL,
    MARKUP,
    SPECIAL,
    THINK,
    trained_definition,
)

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
ARGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GLM_VIDEO = ("<|begin_of_video|>", "<|video|>", "<|end_of_video|>")
DEFINITIONS = {
    "qwen4_exp": lambda: trained_definition(420, (*SPECIAL, *VISION), (*MARKUP, *THINK)),
    "glm5_next": lambda: trained_definition(
        420, (*GLM_SPECIAL, *GLM_VIDEO), (*ARGS, *THINK, *GLM_RESPONSE)
    ),
}


class Library:
    """What the package asks of a tokenizer."""

    unk_token_id = None
    name_or_path = "test"

    def __init__(self, definition: dict[str, Any], eos: str) -> None:
        self._tokenizer = Tokenizer.from_str(json.dumps(definition))
        self.eos_token_id = self._tokenizer.token_to_id(eos)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def decode(self, ids: list[int], **_: Any) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


class InProcess(RenderPool):
    """Renders without a worker process."""

    def __init__(self) -> None:
        """Nothing to start."""

    async def render(self, template: str, context: dict[str, Any]) -> str:
        reply = answer(json.loads(json.dumps({"template": template, "context": context})), 10**6)
        text: str = reply["text"]
        return text


@cache
def ours(family: str) -> tuple[Vocabulary, TemplateRenderer]:
    vocabulary = Vocabulary(DEFINITIONS[family]())
    found = FAMILIES[family]
    assert isinstance(found.default_template, Path)
    template = ChatTemplate.of(found.default_template.read_text("utf-8"))
    return vocabulary, TemplateRenderer(vocabulary, found.rules({}), {}, template, InProcess())


TEXT = st.lists(
    st.sampled_from(["a", "word ", "é字🐴", "\n", " ", "{}", '"', ". "]), max_size=4
).map("".join)
WORDS = TEXT.filter(lambda text: bool(text.strip()))
SCALARS = st.one_of(WORDS, st.integers(-99, 99), st.booleans(), st.none(), st.just([1, {"k": "é"}]))
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "n", "deep"]), SCALARS, max_size=3)


@st.composite
def turns(draw: st.DrawFn) -> list[Message]:
    """A question, perhaps with calls and results in any order, and an answer."""
    messages = [Message("user", (draw(WORDS),))]
    for arguments in draw(st.lists(st.lists(ARGUMENTS, min_size=1, max_size=2), max_size=2)):
        calls = tuple(PastCall(f"c{i}", "get_temp", json.dumps(a)) for i, a in enumerate(arguments))
        messages.append(Message("assistant", (draw(TEXT),), reasoning=draw(WORDS), calls=calls))
        order = draw(st.permutations(range(len(calls))))
        messages += [Message("tool", (draw(WORDS),), call_id=f"c{i}") for i in order]
    messages.append(Message("assistant", (draw(WORDS),), reasoning=draw(st.just("") | WORDS)))
    return messages


CONVERSATIONS = st.tuples(
    st.lists(WORDS.map(lambda text: [Message("system", (text,))]), max_size=1),
    st.lists(turns(), max_size=3),
    WORDS.map(lambda text: [[Message("user", (text,))]]),
).map(lambda groups: [message for group in groups for turn in group for message in turn])


def their_form(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": "".join(message.texts)}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.calls
        ]
    if message.call_id:
        shown["tool_call_id"] = message.call_id
    return shown


def in_order(messages: list[Message]) -> list[Message]:
    """Results in the order of their calls, which is what ties them together."""
    ordered: list[Message] = []
    for message in messages:
        if message.role == "tool":
            start = max(i for i, m in enumerate(ordered) if m.role == "assistant") + 1
            run = sorted([*ordered[start:], message], key=lambda m: m.call_id)
            ordered[start:] = run
        else:
            ordered.append(message)
    return ordered


def check_equal(family: str, theirs: Any, messages: list[Message], **fields: Any) -> None:
    vocabulary, renderer = ours(family)
    prompt = asyncio.run(renderer.render(Conversation(tuple(messages), **fields)))
    expected = theirs.render_ids(
        [their_form(m) for m in in_order(messages)], add_generation_prompt=True
    )
    assert prompt.text == vocabulary.decode(expected, skip_special=False)
    pieces = [piece for piece in prompt.segments if hasattr(piece, "is_special")]
    assert vocabulary.encode_segments(pieces) == expected


MANY = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


@MANY
@given(messages=CONVERSATIONS, thinking=st.booleans(), preserve=st.booleans())
def test_qwen(messages: list[Message], thinking: bool, preserve: bool) -> None:
    preserve = preserve or not thinking  # without thinking the package always preserves
    config = Qwen38RendererConfig(
        enable_thinking=thinking, preserve_thinking=preserve, reasoning_effort="medium"
    )
    theirs = Qwen38Renderer(Library(DEFINITIONS["qwen4_exp"](), "<|im_end|>"), config)
    arguments = {"preserve_thinking": preserve}
    fields = {"effort": "medium", "enable_thinking": thinking, "arguments": arguments}
    check_equal("qwen4_exp", theirs, messages, **fields)


@MANY
@given(
    messages=CONVERSATIONS,
    effort=st.sampled_from(["low", "high", "max"]),
    clear=st.booleans(),
)
def test_glm(messages: list[Message], effort: str, clear: bool) -> None:
    config = GLM53RendererConfig(reasoning_effort=effort, clear_thinking=clear)
    theirs = GLM53Renderer(Library(DEFINITIONS["glm5_next"](), "<|endoftext|>"), config)
    fields = {"effort": effort, "arguments": {"clear_thinking": clear}}
    check_equal("glm5_next", theirs, messages, **fields)


@pytest.mark.parametrize("given_effort", ["none", "minimal", "medium", "xhigh", None])
def test_glm_thinks_with_the_nearest_effort(given_effort: str | None) -> None:
    levels = {"none": "Low", "minimal": "Low", "medium": "High", "xhigh": "Max", None: "Max"}
    renderer = ours("glm5_next")[1]
    asked = Conversation((Message("user", ("Hi",)),), effort=given_effort, enable_thinking=False)
    text = asyncio.run(renderer.render(asked)).text
    head = f"[gMASK]<sop><|system|>Reasoning Effort: {levels[given_effort]}"
    assert text == f"{head}<|user|>Hi<|assistant|><think>"


def test_glm_shows_tools_without_strict() -> None:
    function = {"name": "f", "description": "d é", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": {**function, "strict": True}}
    renderer = ours("glm5_next")[1]
    asked = Conversation((Message("user", ("Hi",)),), tools=(tool,))
    text = asyncio.run(renderer.render(asked)).text
    assert f"<tools>\n{json.dumps(function, ensure_ascii=False)}\n</tools>" in text
