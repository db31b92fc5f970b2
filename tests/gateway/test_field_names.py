"""Responses and messages are answered as chats; their errors name what their client sent."""

from __future__ import annotations

from typing import Any

import pytest
from warhorse.v1 import common_pb2

from services.common.errors import ServiceError
from tests.gateway.conftest import MakeStack, Stack
from tests.gateway.fakes import text_reply

PNG = "data:image/png;base64,AAAA"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

TEXT = {"type": "input_text", "text": "What is it?"}
IMAGE = {"type": "input_image", "image_url": PNG}
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": [TEXT]},
    {"role": "user", "content": [TEXT, TEXT, IMAGE]},
]
BLOCK = {"type": "image", "source": {"type": "url", "url": PNG}}
WORDS = {"type": "text", "text": "What is it?"}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
    {"role": "user", "content": [RESULT | {"content": "x"}, WORDS, WORDS, BLOCK]},
]
INNER = [*TURNS[:2], {"role": "user", "content": [WORDS, RESULT | {"content": [WORDS, BLOCK]}]}]

# path, body, the image's place in the rendered chat, its place in the body
PLACES: dict[str, tuple[str, dict[str, Any], tuple[int, int], str]] = {
    "input": (RESPONSES, {"input": ITEMS}, (3, 2), "input.5.content.2"),
    "instructions": (
        RESPONSES, {"input": ITEMS, "instructions": "Be short."}, (4, 2), "input.5.content.2",
    ),
    "output": (
        RESPONSES,
        {"input": [*ITEMS[:4], ITEMS[4] | {"output": [TEXT, IMAGE]}]},
        (2, 1),
        "input.4.output.1",
    ),
    "blocks": (MESSAGES, {"messages": TURNS}, (3, 2), "messages.2.content.3"),
    "system": (
        MESSAGES, {"messages": TURNS, "system": "Be short."}, (4, 2), "messages.2.content.3",
    ),
    "result": (MESSAGES, {"messages": INNER}, (2, 1), "messages.2.content.1.content.1"),
}  # fmt: skip


def shown(path: str, response: Any, status: int = 400) -> tuple[str | None, str]:
    """`param` and message of an error; messages have the path in the message alone."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return (None if path == MESSAGES else error["param"]), error["message"]


async def ask(stack: Stack, path: str, body: dict[str, Any], **fields: Any) -> Any:
    needed = {"max_tokens": 5} if path == MESSAGES else {}
    return await stack.http.post(path, json={**needed, **body, **fields})


@pytest.mark.parametrize("name", PLACES)
async def test_model_without_vision_names_the_image(stack: Stack, name: str) -> None:
    path, body, _, place = PLACES[name]
    param, message = shown(path, await ask(stack, path, body))
    assert param in (place, None)
    assert place in (param or message)


@pytest.mark.parametrize("name", PLACES)
async def test_refusal_of_the_tokenizer_names_the_image(make_stack: MakeStack, name: str) -> None:
    path, body, (index, part), place = PLACES[name]
    stack = await make_stack(takes_images=True)
    field = f"messages.{index}.content.{part}.image_url"
    stack.tokenizer.refusal = ServiceError(
        common_pb2.ERROR_REASON_INVALID_FIELD, "the image is corrupt", field=field
    )
    param, message = shown(path, await ask(stack, path, body))
    rendered = stack.tokenizer.renders[0].messages[index].content[part]
    assert rendered.image_url == PNG
    full = f"{place}.{'source' if path == MESSAGES else 'image_url'}"
    assert param in (full, None)
    assert message == ("the image is corrupt" if param else f"{full}: the image is corrupt")


@pytest.mark.parametrize("route", ["/v1/responses/render", "/v1/messages/render"])
async def test_rendering_alone_names_the_image_too(stack: Stack, route: str) -> None:
    path, body, _, place = PLACES["input" if "responses" in route else "blocks"]
    param, message = shown(path, await ask(stack, route, body))
    assert place in (param or message)


async def test_counting_names_the_image_too(stack: Stack) -> None:
    response = await ask(stack, "/v1/messages/count_tokens", {"messages": TURNS})
    assert shown(MESSAGES, response)[1].startswith("messages.2.content.3: ")


async def test_refusal_of_the_engine_names_the_input(make_stack: MakeStack) -> None:
    stack = await make_stack(takes_images=True)
    reason = common_pb2.ERROR_REASON_UNSUPPORTED
    refusal = ServiceError(reason, "this model takes no images", field="images")
    stack.engine.replies = [text_reply("", error=refusal)]
    response = await ask(stack, RESPONSES, {"input": ITEMS})
    assert shown(RESPONSES, response) == ("input", "this model takes no images")


async def test_stored_images_have_no_place_in_the_next_request(make_stack: MakeStack) -> None:
    stack = await make_stack(takes_images=True)
    first = (await ask(stack, RESPONSES, {"input": ITEMS})).json()["id"]
    gateway = stack.app.state.gateway
    gateway.engines.info.model.takes_images = False
    response = await ask(stack, RESPONSES, {"input": "Why?", "previous_response_id": first})
    assert shown(RESPONSES, response)[0] == "input"


OTHERS: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"input": "x" * 600}, "input"),
    (RESPONSES, {"input": "x", "max_output_tokens": 600}, "max_output_tokens"),
    (RESPONSES, {"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    (RESPONSES, {"input": [{"role": "user", "content": [IMAGE | {"detail": "huge"}]}]},
     "input.0.content.0.image_url.detail"),
    (MESSAGES, {"messages": TURNS, "output_config": {"effort": "huge"}}, "output_config.effort"),
    (MESSAGES, {"messages": TURNS[:1], "stop_sequences": [""]}, "stop_sequences"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "field"), OTHERS)
async def test_other_fields_have_their_own_names(
    stack: Stack, path: str, body: dict[str, Any], field: str
) -> None:
    param, message = shown(path, await ask(stack, path, body))
    assert param in (field, None)
    assert field in message or param == field
