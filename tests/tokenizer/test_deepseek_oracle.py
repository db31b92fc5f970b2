"""Prompts of DeepSeek V4 and V4.1 equal those of DeepSeek's own package, token for token."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import deepseek_recipe
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from warhorse.v1 import tokenizer_pb2

from services.tokenizer.rendering.conversation import from_request
from services.tokenizer.rendering.deepseek import MARK, V4, V41, DeepSeekRenderer
from services.tokenizer.rendering.deepseek_texts import v4_texts, v41_texts
from services.tokenizer.rendering.prompt import Prompt
from services.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.support import DEEPSEEK_SPECIAL, THINK, deepseek_definition

MODELS = {"v4": "DeepSeek-V4-Pro", "v41": "DeepSeek-V4.1-Flash"}
EVIL = [*DEEPSEEK_SPECIAL[:6], *THINK, MARK, f"</{MARK}invoke>", "<", "｜"]
TEXT = st.lists(
    st.sampled_from(["", "a", "word ", "é字🐴", "\n", "\n\n", " ", "{}", '"', *EVIL]), max_size=4
).map("".join)
NAMES = st.sampled_from(["f", "get_temp", "now", "a-b_C"])
SCALARS = st.one_of(
    TEXT, st.integers(-(2**53), 2**53), st.booleans(), st.none(), st.sampled_from([1.5, -0.25, 2.0])
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=2) | st.dictionaries(TEXT, v, max_size=2), max_leaves=4
)
ARGUMENTS = st.one_of(
    st.dictionaries(TEXT, VALUES, max_size=3).map(lambda v: json.dumps(v, ensure_ascii=False)),
    st.sampled_from(["{}", "", "{bad", "[1]", "null", '"x"', ' {"a": 1.50} ']),
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"name": NAMES},
        optional={
            "description": TEXT,
            "parameters": st.dictionaries(TEXT.map("x{}".format), VALUES, max_size=2).map(
                lambda schema: {**schema, "type": "object"}
            ),
        },
    ),
    max_size=2,
    unique_by=lambda tool: tool["name"],
)
CONTENT = TEXT | st.lists(TEXT, min_size=1, max_size=3)


def parts(content: str | list[str]) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": text} for text in content]


def plain(role: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    contents = TEXT if role == "latest_reminder" else CONTENT
    return contents.map(lambda content: [{"role": role, "content": parts(content)}])


def answer(content: str, reasoning: str | None) -> list[dict[str, Any]]:
    message = {"role": "assistant", "content": content}
    return [message if reasoning is None else {**message, "reasoning_content": reasoning}]


ANSWER = st.builds(answer, TEXT, st.none() | TEXT)


@st.composite
def tool_loops(draw: st.DrawFn) -> list[dict[str, Any]]:
    """An assistant message with calls and their results in any order."""
    calls = draw(st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3))
    message: dict[str, Any] = {
        "role": "assistant",
        "content": draw(TEXT | st.none()),
        "tool_calls": [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ],
    }
    reasoning = draw(st.none() | TEXT)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    order = draw(st.permutations(range(len(calls))))
    results = [
        {"role": "tool", "tool_call_id": f"c{i}", "content": parts(draw(CONTENT))} for i in order
    ]
    return [message, *results]


TURNS = (
    st.lists(
        st.one_of(
            plain("user"),
            plain("user"),
            plain("system"),
            plain("latest_reminder"),
            ANSWER,
            tool_loops(),
        ),
        min_size=1,
        max_size=6,
    )
    .map(lambda turns: [message for turn in turns for message in turn])
    .filter(
        # Of nothing but empty system messages the package makes a prompt without the effort.
        lambda messages: any(
            m["role"] != "system" or m["content"] not in ("", parts([""])) for m in messages
        )
    )
)
FORMATS = st.sampled_from(
    [
        None,
        None,
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "é": 1}}},
    ]
)
SETTINGS = st.fixed_dictionaries(
    {"response_format": FORMATS},
    optional={
        "reasoning_effort": st.sampled_from(
            ["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]
        ),
        "thinking": st.sampled_from([{"type": "enabled"}, {"type": "disabled"}]),
        "tool_choice": st.sampled_from(["auto", "none"]),
    },
)


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(deepseek_definition())


@cache
def encodings() -> dict[str, Any]:
    tokenizer = deepseek_recipe.Tokenizer.from_str(json.dumps(deepseek_definition()))
    return {
        "v4": deepseek_recipe.DeepseekV4Encoding().with_tokenizer(tokenizer),
        "v41": deepseek_recipe.DeepseekV41Encoding().with_tokenizer(tokenizer),
    }


@cache
def renderers() -> dict[str, DeepSeekRenderer]:
    return {
        "v4": DeepSeekRenderer(vocabulary(), V4, v4_texts(None, {})),
        "v41": DeepSeekRenderer(vocabulary(), V41, v41_texts()),
    }


def as_message(message: dict[str, Any]) -> tokenizer_pb2.ChatMessage:
    content = message["content"] or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return tokenizer_pb2.ChatMessage(
        role=message["role"],
        content=[tokenizer_pb2.ContentPart(text=text) for text in texts],
        reasoning=message.get("reasoning_content") or "",
        tool_calls=[
            tokenizer_pb2.ToolCall(id=c["id"], **c["function"])
            for c in message.get("tool_calls", [])
        ],
        tool_call_id=message.get("tool_call_id", ""),
    )


def as_tool(tool: dict[str, Any]) -> tokenizer_pb2.Tool:
    shown = tokenizer_pb2.Tool(name=tool["name"])
    if "description" in tool:
        shown.description = tool["description"]
    if "parameters" in tool:
        shown.parameters_json = json.dumps(tool["parameters"])
    return shown


def ours(kind: str, body: dict[str, Any]) -> Prompt:
    request = tokenizer_pb2.RenderRequest(
        messages=[as_message(message) for message in body["messages"]],
        tools=[as_tool(tool["function"]) for tool in body.get("tools", [])],
        tool_choice={
            None: tokenizer_pb2.TOOL_CHOICE_UNSPECIFIED,
            "auto": tokenizer_pb2.TOOL_CHOICE_AUTO,
            "none": tokenizer_pb2.TOOL_CHOICE_NONE,
        }[body.get("tool_choice")],
        continue_final_message=bool(body["messages"][-1].get("prefix")),
    )
    if "reasoning_effort" in body:
        request.reasoning_effort = body["reasoning_effort"]
    if "thinking" in body:
        request.enable_thinking = body["thinking"]["type"] == "enabled"
    if body.get("response_format"):
        request.response_format_json = json.dumps(body["response_format"])
    return asyncio.run(renderers()[kind].render(from_request(request)))


def theirs(kind: str, body: dict[str, Any]) -> Any:
    request = deepseek_recipe.ChatCompletionRequest({**body, "model": MODELS[kind]})
    return request.convert(deepseek_recipe.ConversionOptions()).conversation


def check_equal(kind: str, body: dict[str, Any]) -> None:
    """Equal in text, in control tokens and in ids."""
    conversation = theirs(kind, body)
    rendered = encodings()[kind].render_conversation(conversation)
    prompt = ours(kind, body)
    assert prompt.text == rendered.prompt
    start, specials = 0, []
    for segment in prompt.segments:
        if segment.is_special:
            specials.append((start, start + len(segment.text)))
        start += len(segment.text)
    assert specials == rendered.special_ranges
    assert vocabulary().encode_segments(prompt.segments) == encodings()[kind].encode(conversation)


def loops_without_tools(body: dict[str, Any]) -> bool:
    """Where V4.1 shows the reasoning that the package leaves out."""
    shown = body.get("tools") and body.get("tool_choice") != "none"
    return not shown and any(m.get("tool_calls") for m in body["messages"])


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=TURNS, tools=TOOLS, options=SETTINGS)
def test_prompt_equals_the_package(
    kind: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"messages": messages, **options}
    if tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
    else:
        body.pop("tool_choice", None)
    if body["response_format"] is None:
        del body["response_format"]
    elif body["response_format"]["type"] == "json_object":
        # The package wants the word in the conversation.
        body["messages"] = [*messages, {"role": "user", "content": "json"}]
    if body.get("reasoning_effort") == "none":
        body.pop("thinking", None)  # where the two disagree, we follow the effort
    if kind == "v41" and loops_without_tools(body):
        body["thinking"] = {"type": "disabled"}
    check_equal(kind, body)


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    messages=TURNS.filter(lambda messages: not any(m.get("tool_calls") for m in messages)),
    content=TEXT,
    reasoning=st.none() | TEXT,
    effort=st.sampled_from(["none", "low", "max"]),
)
def test_continued_message_equals_the_package(
    kind: str,
    messages: list[dict[str, Any]],
    content: str,
    reasoning: str | None,
    effort: str,
) -> None:
    last: dict[str, Any] = {"role": "assistant", "content": content, "prefix": True}
    if reasoning is not None:
        last["reasoning_content"] = reasoning
    first = {"role": "user", "content": "q"}
    body: dict[str, Any] = {"messages": [first, *messages, last], "reasoning_effort": effort}
    check_equal(kind, body)
