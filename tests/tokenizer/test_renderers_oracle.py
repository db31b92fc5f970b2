"""The built-in formats of GLM and Qwen equal those of an independent package, token for token.

The package is `renderers`. Its words about tools and efforts are the checkpoints' and not ours: for
conversations with tools our template borrows the package's words, and for Qwen the effort is the
one without a text.
"""

from __future__ import annotations

import asyncio
import json
import re
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


PROBE = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}
HI = Message("user", ("Hi",))


def renderer_of(family: str, source: str) -> TemplateRenderer:
    vocabulary, rules = Vocabulary(DEFINITIONS[family]()), FAMILIES[family].rules({})
    return TemplateRenderer(vocabulary, rules, {}, ChatTemplate.of(source), InProcess())


def built_in(family: str) -> str:
    found = FAMILIES[family].default_template
    assert isinstance(found, Path)
    return found.read_text("utf-8")


@cache
def ours(family: str) -> tuple[Vocabulary, TemplateRenderer]:
    return Vocabulary(DEFINITIONS[family]()), renderer_of(family, built_in(family))


@cache
def with_their_words(family: str) -> TemplateRenderer:
    """Our template with the package's words in front of and behind the list of tools."""
    asked = Conversation((HI,), tools=(PROBE,))
    vocabulary, renderer = ours(family)
    ids = their_renderer(family).render_ids([their_form(HI)], tools=[PROBE])
    own = tool_words(asyncio.run(renderer.render(asked)).text)
    borrowed = tool_words(vocabulary.decode(ids, skip_special=False))
    source = built_in(family)
    for words, others in zip(own, borrowed, strict=True):
        assert source.count(quoted(words)) == 1
        source = source.replace(quoted(words), quoted(others))
    return renderer_of(family, source)


def their_renderer(family: str, **fields: Any) -> Any:
    if family == "glm5_next":
        library = Library(DEFINITIONS[family](), "<|endoftext|>")
        return GLM53Renderer(library, GLM53RendererConfig(**fields))
    config = Qwen38RendererConfig(reasoning_effort="medium", **fields)
    return Qwen38Renderer(Library(DEFINITIONS[family](), "<|im_end|>"), config)


def tool_words(text: str) -> tuple[str, str]:
    """What stands in front of and behind the list of tools."""
    found = re.search(r"(# Tools.*)<tools>\n.*\n</tools>\n\n(.*?)<\|", text, re.DOTALL)
    assert found is not None
    return found[1], found[2]


def quoted(text: str) -> str:
    """The text as it stands between the quotes of a template."""
    return text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")


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


SYSTEM = st.lists(WORDS.map(lambda text: Message("system", (text,))), max_size=1)


@st.composite
def conversations(draw: st.DrawFn, system_anywhere: bool = False) -> list[Message]:
    """Up to three turns and a question. A content of several texts is a list of parts."""
    messages = draw(SYSTEM)
    for turn in draw(st.lists(turns(), max_size=3)):
        messages += turn + (draw(SYSTEM) if system_anywhere else [])
    return [*messages, Message("user", tuple(draw(st.lists(WORDS, min_size=1, max_size=2))))]


KEYS = st.sampled_from(["city", "n", "déep", "type", "$defs"])
SCHEMAS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3)
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["get_temp", "now"])},
    optional={
        "description": TEXT,
        "parameters": st.dictionaries(KEYS, SCHEMAS, max_size=3),
        "strict": st.booleans(),
    },
)
TOOLS = st.lists(FUNCTIONS.map(lambda f: {"type": "function", "function": f}), max_size=3)


def their_form(message: Message) -> dict[str, Any]:
    texts: Any = [{"type": "text", "text": text} for text in message.texts]
    shown: dict[str, Any] = {"role": message.role, "content": texts}
    if len(texts) == 1:
        shown["content"] = message.texts[0]
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


def check_equal(
    family: str, theirs: Any, messages: list[Message], tools: list[dict[str, Any]], **fields: Any
) -> None:
    vocabulary, plain = ours(family)
    renderer = with_their_words(family) if tools else plain
    asked = Conversation(tuple(messages), tools=tuple(tools), **fields)
    prompt = asyncio.run(renderer.render(asked))
    expected = theirs.render_ids(
        [their_form(m) for m in in_order(messages)], tools=tools, add_generation_prompt=True
    )
    assert prompt.text == vocabulary.decode(expected, skip_special=False)
    pieces = [piece for piece in prompt.segments if hasattr(piece, "is_special")]
    assert vocabulary.encode_segments(pieces) == expected


MANY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@MANY
@given(messages=conversations(), tools=TOOLS, thinking=st.booleans(), preserve=st.booleans())
def test_qwen(messages: Any, tools: Any, thinking: bool, preserve: bool) -> None:
    preserve = preserve or not thinking  # without thinking the package always preserves
    arguments = {"preserve_thinking": preserve}
    fields = {"effort": "medium", "enable_thinking": thinking, "arguments": arguments}
    package = their_renderer("qwen4_exp", enable_thinking=thinking, **arguments)
    check_equal("qwen4_exp", package, messages, tools, **fields)


@MANY
@given(
    messages=conversations(system_anywhere=True),
    tools=TOOLS,
    effort=st.sampled_from(["low", "high", "max"]),
    clear=st.booleans(),
)
def test_glm(messages: Any, tools: Any, effort: str, clear: bool) -> None:
    fields = {"effort": effort, "arguments": {"clear_thinking": clear}}
    package = their_renderer("glm5_next", reasoning_effort=effort, clear_thinking=clear)
    check_equal("glm5_next", package, messages, tools, **fields)


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
