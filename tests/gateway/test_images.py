"""Images of chat requests: to the tokenizer, to the engine, and what becomes of lost ones."""

from __future__ import annotations

from typing import Any

import pytest
from warhorse.v1 import common_pb2

from services.common.errors import ServiceError
from tests.gateway.conftest import MakeStack, Stack
from tests.gateway.fakes import IMAGE_TEXT, text_reply
from tests.gateway.sse import Frames

URL = "data:image/png;base64,AAAA"
TEXT = {"type": "text", "text": "What is it? "}
GONE = ServiceError(
    common_pb2.ERROR_REASON_STALE_GENERATION, "the region is gone", field="images[0]"
)


@pytest.fixture
async def vision(make_stack: MakeStack) -> Stack:
    return await make_stack(takes_images=True)


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image(url: str = URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


SPELLINGS = {
    "object": (image(), ""),
    "object with detail": (image(detail="low"), "low"),
    "plain text": ({"type": "image_url", "image_url": URL}, ""),
    "input_image": ({"type": "input_image", "image_url": URL, "detail": "high"}, "high"),
}


@pytest.mark.parametrize("name", SPELLINGS)
async def test_image_reaches_the_tokenizer(vision: Stack, name: str) -> None:
    part, detail = SPELLINGS[name]
    response = await vision.chat(**user(TEXT, part))
    assert response.status_code == 200
    content = vision.tokenizer.renders[0].messages[0].content
    assert content[0].text == TEXT["text"]
    assert (content[1].image_url, content[1].image_detail) == (URL, detail)


async def test_images_reach_the_engine_and_the_usage(vision: Stack) -> None:
    response = await vision.chat(**user(TEXT, image(), image()), n=2)
    (request,) = vision.engine.requests
    spans = [(one.offset, one.length) for one in request.images]
    assert request.n == 2 and spans == [(18, 8), (26, 8)]
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == len("user: What is it? ") + 2 * len(IMAGE_TEXT)
    assert usage["prompt_tokens_details"]["multimodal_tokens"] == {"image": 16}
    assert len(response.json()["choices"]) == 2


async def test_images_and_those_not_decoded_anew_are_counted(vision: Stack) -> None:
    for vision.tokenizer.images_kept in (0, 2):
        await vision.chat(**user(TEXT, image(), image()))
    await vision.chat()
    page = (await vision.http.get("/metrics")).text
    labels = '{engine="0",model_name="fake-model"}'
    assert f"vllm:mm_cache_queries_total{labels} 4.0\n" in page
    assert f"vllm:mm_cache_hits_total{labels} 2.0\n" in page


async def test_usage_without_images_names_none(vision: Stack) -> None:
    usage = (await vision.chat()).json()["usage"]
    assert "multimodal_tokens" not in usage["prompt_tokens_details"]


async def test_sdk_sends_images(vision: Stack) -> None:
    answer = await vision.sdk.chat.completions.create(model="", **user(TEXT, image()))
    assert answer.choices[0].message.content == "Hello!"


async def test_refusal_of_an_image_names_its_part(vision: Stack) -> None:
    field = "messages.0.content.1.image_url"
    vision.tokenizer.refusal = ServiceError(
        common_pb2.ERROR_REASON_INVALID_FIELD, "the image is corrupt", field=field
    )
    response = await vision.chat(**user(TEXT, image()))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


BAD = {
    "no url": ({"type": "image_url"}, "messages.0.content.1.image_url"),
    "empty url": (image(""), "messages.0.content.1.image_url.url"),
    "number": ({"type": "image_url", "image_url": 7}, "messages.0.content.1.image_url"),
    "detail": (image(detail="huge"), "messages.0.content.1.image_url.detail"),
}


@pytest.mark.parametrize("name", BAD)
async def test_malformed_part_is_refused(vision: Stack, name: str) -> None:
    part, field = BAD[name]
    response = await vision.chat(**user(TEXT, part))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert vision.tokenizer.renders == []


@pytest.mark.parametrize("blind", ["engine", "tokenizer"])
async def test_model_without_vision_refuses_before_rendering(
    make_stack: MakeStack, blind: str
) -> None:
    stack = await make_stack(takes_images=True)
    for info in (stack.app.state.gateway.engines.info, stack.app.state.gateway.tokenizers.info):
        info.model.takes_images = info.DESCRIPTOR.name != f"Describe{blind.title()}Response"
    response = await stack.chat(**user(TEXT, image()))
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "messages.0.content.1"
    assert error["message"] == "A message part with an image is not currently supported."
    assert stack.tokenizer.renders == []


async def test_engine_without_vision_is_no_fault_of_the_server(vision: Stack) -> None:
    refusal = ServiceError(
        common_pb2.ERROR_REASON_UNSUPPORTED, "this model takes no images", field="images"
    )
    vision.engine.replies = [text_reply("", error=refusal)]
    response = await vision.chat(**user(TEXT, image()))
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "messages"
    assert error["message"] == "this model takes no images"


async def test_prompt_with_images_is_not_truncated(vision: Stack) -> None:
    response = await vision.chat(**user(TEXT, image()), truncate_prompt_tokens=10)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "truncate_prompt_tokens"
    assert (await vision.chat(**user(image()), truncate_prompt_tokens=100)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_images_that_are_gone_are_rendered_again(vision: Stack, stream: bool) -> None:
    vision.engine.replies = [text_reply("", error=GONE), text_reply("It is a horse.")]
    if stream:
        frames: Frames = await vision.stream(**user(TEXT, image()))
        assert frames.joined("content") == "It is a horse."
    else:
        response = await vision.chat(**user(TEXT, image()))
        assert response.json()["choices"][0]["message"]["content"] == "It is a horse."
    digests = [one.images[0].digest[0] for one in vision.engine.requests]
    assert digests == [1, 2] and len(vision.tokenizer.renders) == 2


async def test_images_that_are_gone_twice_are_a_clear_error(vision: Stack) -> None:
    vision.engine.replies = [text_reply("", error=GONE)]
    response = await vision.chat(**user(TEXT, image()))
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert "images of the request were lost" in response.json()["error"]["message"]
    assert len(vision.engine.requests) == 2


async def test_stale_state_without_images_is_not_rendered_again(vision: Stack) -> None:
    vision.engine.replies = [text_reply("", error=GONE)]
    response = await vision.chat()
    assert response.status_code == 503
    assert len(vision.engine.requests) == 1 and len(vision.tokenizer.renders) == 1
