"""Whatever a field holds: an answer or a refusal that names the field, never a fault of ours."""

from __future__ import annotations

import itertools
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
