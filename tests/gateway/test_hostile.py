"""Whatever a field holds: an answer or a refusal that names the field, never a fault of ours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from services.gateway.messages.schema import MessagesRequest
from services.gateway.responses.schema import ResponsesRequest
from services.gateway.schema.chat import ChatRequest
from services.gateway.schema.completion import CompletionRequest
from tests.gateway.conftest import Stack
from tests.gateway.test_bad_input import TOOL, nested, user

TURN = user("Hi")
ENDPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": TURN}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
    "/v1/messages": (MessagesRequest, {"messages": TURN, "max_tokens": 9}),
}
VALUES: list[Any] = [-1, 2**63, 1e308, "\x00", [None], [{}], nested(200)]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_no_value_of_a_field_is_a_fault(stack: Stack, path: str) -> None:
    model, body = ENDPOINTS[path]
    failures = []
    for name, value in itertools.product(model.model_fields, VALUES):
        response = await stack.http.post(path, json={**body, name.rstrip("_"): value})
        if response.status_code >= 500:
            failures.append((name, value, response.text))
        elif response.status_code != 200:
            error = response.json()["error"]
            named = error.get("param") or error["message"]
            if name not in named:
                failures.append((name, value, response.text))
    assert not failures, failures[:5]


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
SCHEMA = {"name": "n", "schema": {"type": "object"}, "strict": True}
RICH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"},
            {"role": "assistant", "content": "y", "reasoning": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "z"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
        "stream_options": {"include_usage": True},
        "stream": True,
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "reasoning": {"effort": "low", "enabled": True},
        "chat_template_kwargs": {"enable_thinking": True},
        "logit_bias": {"1": 1.5},
    },
    "/v1/completions": {
        "prompt": [[1, 2], [3]],
        "structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": " ?"},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "s"}],
                "content": [{"type": "reasoning_text", "text": "t"}],
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "text"}]},
            {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "x"},
        ],
        "tools": [
            FUNCTION,
            {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark"}},
            {"type": "namespace", "name": "m", "tools": [FUNCTION]},
        ],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", **SCHEMA}, "verbosity": "low"},
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "u", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "u", "content": [{"type": "text"}]}
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "max_tokens": 1100,
        "output_config": {"effort": "low", "format": {"type": "json_schema", **SCHEMA}},
    },
}
# Two depths: one that is refused whatever it is in, one that still fits into a body.
INSERTED: list[Any] = [None, True, 1e308, [None], {"a": None}, nested(500), nested(220)]


def variants(node: Any) -> Iterator[Any]:
    """Copies of `node`, each with one value inside replaced by one of `INSERTED`."""
    yield from INSERTED
    if isinstance(node, dict):
        for key, value in node.items():
            yield from ({**node, key: v} for v in variants(value))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from ([*node[:i], v, *node[i + 1 :]] for v in variants(value))


@pytest.mark.parametrize("path", RICH)
async def test_no_value_at_any_depth_is_a_fault(stack: Stack, path: str) -> None:
    failures = []
    for field, value in RICH[path].items():
        for changed in variants(value):
            response = await stack.http.post(path, json={**RICH[path], field: changed})
            refused = response.status_code == 400 and len(response.content) < 2048
            if response.status_code != 200 and not refused:
                failures.append((field, response.status_code, str(changed)[:200]))
    assert not failures, failures[:5]


FORMATS: list[dict[str, Any] | None] = [
    None,
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
]
CHOICES = [None, "none", "auto", "required", {"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_tools_and_formats_combine(stack: Stack, stream: bool) -> None:
    for n, choice, form in itertools.product((1, 3), CHOICES, FORMATS):
        tools = {"tools": [TOOL], "tool_choice": choice} if choice else {}
        fields = tools | {"n": n, "stream": stream, "response_format": form, "max_tokens": 9}
        response = await stack.chat(**fields)
        assert response.status_code == 200, (fields, response.text)
        if stream:
            assert response.text.endswith("data: [DONE]\n\n"), fields
            assert response.text.count('"finish_reason":"') == n, fields
        else:
            assert [c["index"] for c in response.json()["choices"]] == list(range(n)), fields


async def test_last_of_doubled_keys_counts(stack: Stack) -> None:
    body = b'{"messages": 5, "messages": [{"role": "user", "content": "Hi"}]}'
    headers = {"content-type": "application/json"}
    response = await stack.http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 200
