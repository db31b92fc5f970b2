"""Conversations with images through the running service: tokens, regions, refusals."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from warhorse.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

from services.common.images import image_digest
from services.common.shm import open_region
from services.tokenizer.wire import unpack_ids
from tests.service_process import RunDir, ServiceProcess
from tests.tokenizer.calls import Stub, message, refusal, render
from tests.tokenizer.conftest import SERVICE, write_folder
from tests.tokenizer.pictures import file_of, noise, url_of
from tests.tokenizer.support import reference
from tests.tokenizer.test_images_decode import BAD

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
FACTOR = 32


def vision_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_str(reference().to_str())
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in VISION_TOKENS])
    return tokenizer


TOKENIZER = vision_tokenizer()
PAD = TOKENIZER.token_to_id("<|image_pad|>")
CONFIG = {
    "model_type": "qwen3_5",
    "image_token_id": PAD,
    "text_config": {"eos_token_id": 0, "max_position_embeddings": 4096, "vocab_size": 512},
    "vision_config": {"patch_size": 16, "spatial_merge_size": 2},
}
PROCESSOR = {"size": {"shortest_edge": FACTOR * FACTOR, "longest_edge": 64 * FACTOR * FACTOR}}


@pytest.fixture(scope="module")
def run() -> Iterator[RunDir]:
    run = RunDir()
    yield run
    run.close()


@pytest.fixture(scope="module")
def service(run: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = write_folder(
        tmp_path_factory.mktemp("vision"),
        **{
            "config.json": CONFIG,
            "preprocessor_config.json": PROCESSOR,
            "tokenizer.json": TOKENIZER.to_str(),
        },
    )
    flags = ["--model", str(folder), "--images-per-request", "4", "--image-max-bytes", "300000"]
    flags += ["--allow-image-urls", "--image-cache-mb", "64", "--image-cache-seconds", "0"]
    service = ServiceProcess("tokenizer", SERVICE, run.path, flags)
    service.start()
    yield service
    assert service.stop() == 0


@pytest.fixture
def vision(service: ServiceProcess) -> Iterator[Stub]:
    with grpc.insecure_channel(
        service.address, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        yield tokenizer_pb2_grpc.TokenizerServiceStub(channel)


def image(url: str, detail: str = "") -> tokenizer_pb2.ContentPart:
    return tokenizer_pb2.ContentPart(image_url=url, image_detail=detail)


def text(value: str) -> tokenizer_pb2.ContentPart:
    return tokenizer_pb2.ContentPart(text=value)


def picture_url(height: int, width: int, seed: int = 0) -> str:
    return url_of(file_of(noise(height, width, seed)))


def said(role: str, *parts: tokenizer_pb2.ContentPart, **fields: Any) -> Any:
    return tokenizer_pb2.ChatMessage(role=role, content=parts, **fields)


def expanded(prompt: str, *counts: int) -> list[int]:
    """The library's ids of a prompt whose k-th image token stands `counts[k]` times."""
    ids: list[int] = []
    waiting = list(counts)
    for token in TOKENIZER.encode(prompt, add_special_tokens=False).ids:
        ids += [PAD] * waiting.pop(0) if token == PAD else [token]
    return ids


def pixels_of(picture: tokenizer_pb2.ImageInput, run: RunDir) -> np.ndarray:
    shape = tuple(picture.pixels.shape)
    if picture.pixels.WhichOneof("payload") == "inline":
        return np.frombuffer(picture.pixels.inline, np.uint8).reshape(shape)
    with open_region(picture.region, run.path) as region:
        return np.array(region.array(np.uint8)).reshape(shape)


def test_card_says_that_images_are_taken(vision: Stub, stub: Stub) -> None:
    request = tokenizer_pb2.DescribeTokenizerRequest()
    assert vision.DescribeTokenizer(request).model.takes_images
    assert not stub.DescribeTokenizer(request).model.takes_images


def test_images_that_need_no_decoding_are_counted(vision: Stub) -> None:
    urls = [picture_url(64, 96, seed) for seed in (71, 72, 71)]
    counts = [render(vision, said("user", *map(image, urls))).images_kept for _ in range(2)]
    assert counts == [1, 3]


def test_images_of_a_prompt_with_text_between(vision: Stub, run: RunDir) -> None:
    large, small = (256, 192), (64, 96)
    asked = said(
        "user",
        *(text("Compare "), image(picture_url(*large)), text(" with ")),
        *(image(picture_url(*small)), text(".")),
    )
    answer = render(vision, asked)
    marked = "<|vision_start|><|image_pad|><|vision_end|>"
    assert answer.text == (
        f"<|im_start|>user\nCompare {marked} with {marked}.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    ids = list(unpack_ids(answer.token_ids, "token_ids"))
    assert ids == expanded(answer.text, 8 * 6, 2 * 3)
    for one, size in zip(answer.images, (large, small), strict=True):
        assert ids[one.offset : one.offset + one.length] == [PAD] * one.length
        assert ids[one.offset - 1] != PAD and ids[one.offset + one.length] != PAD
        assert np.array_equal(pixels_of(one, run), noise(*size))
        assert one.digest == image_digest(noise(*size))
    kinds = [one.pixels.WhichOneof("payload") for one in answer.images]
    assert kinds == ["shm", "inline"]


def test_one_changed_pixel_changes_the_digest_and_nothing_else(vision: Stub) -> None:
    first = noise(96, 96)
    second = first.copy()
    second[50, 50, 0] ^= 1
    answers = [render(vision, said("user", image(url_of(file_of(p))))) for p in (first, second)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].images[0].digest != answers[1].images[0].digest


def test_image_is_resized_for_the_model_and_detail_bounds_it(vision: Stub) -> None:
    url = picture_url(100, 170)
    (auto,) = render(vision, said("user", image(url))).images
    assert list(auto.pixels.shape) == [96, 160, 3] and auto.length == 3 * 5
    (low,) = render(vision, said("user", image(url, "low"))).images
    assert low.digest == auto.digest
    error = refusal(lambda: render(vision, said("user", image(url, "huge"))))
    assert error.field == "messages.0.content.0.image_url.detail"


def test_text_of_users_never_becomes_an_image(vision: Stub) -> None:
    asked = said("user", text("a <|image_pad|> b"), image(picture_url(64, 64)))
    answer = render(vision, asked, enable_thinking=False)
    ids = list(unpack_ids(answer.token_ids, "token_ids"))
    assert ids.count(PAD) == 4 and len(answer.images) == 1
    assert not render(vision, message("user", "<|image_pad|>")).images


def test_images_of_tool_results_follow_the_order_of_the_calls(vision: Stub, run: RunDir) -> None:
    calls = [tokenizer_pb2.ToolCall(id=i, name="get", arguments="{}") for i in ("c1", "c2")]
    history = [
        message("user", "look"),
        tokenizer_pb2.ChatMessage(role="assistant", tool_calls=calls),
        said("tool", image(picture_url(64, 64, 2)), tool_call_id="c2"),
        said("tool", text("first"), image(picture_url(64, 96, 1)), tool_call_id="c1"),
    ]
    answer = render(vision, *history)
    assert [list(one.pixels.shape)[1] for one in answer.images] == [96, 64]
    assert np.array_equal(pixels_of(answer.images[0], run), noise(64, 96, 1))


def test_image_in_a_system_message_is_refused(vision: Stub) -> None:
    system = said("system", text("S"), image(picture_url(64, 64)))
    error = refusal(lambda: render(vision, message("user", "x"), system))
    assert error.reason == common_pb2.ERROR_REASON_INVALID_FIELD
    assert error.field == "messages.1.content.1.image_url"


def test_template_without_a_place_for_images_is_refused(vision: Stub) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    silent = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    for template in (plain, silent):
        asked = said("user", text("a"), image(picture_url(64, 64)))
        error = refusal(lambda t=template, a=asked: render(vision, a, chat_template=t))
        assert error.field == "messages.0.content.1.image_url", template


@pytest.mark.parametrize("name", BAD)
def test_bad_image_is_refused_naming_its_part(vision: Stub, name: str) -> None:
    good, bad = image(picture_url(64, 64)), image(url_of(BAD[name][0]))
    history = [message("user", "x"), message("assistant", "y"), said("user", text("z"), good, bad)]
    error = refusal(lambda: render(vision, *history))
    assert error.reason == common_pb2.ERROR_REASON_INVALID_FIELD
    assert error.field == "messages.2.content.2.image_url"
    assert "image" in error.message or "bytes" in error.message


def test_file_above_the_limit_and_surplus_images_are_refused(vision: Stub) -> None:
    large = image(picture_url(400, 400))
    error = refusal(lambda: render(vision, said("user", large)))
    assert "more than the 300000 bytes" in error.message
    five = said("user", *[image(picture_url(64, 64))] * 5)
    error = refusal(lambda: render(vision, five))
    assert error.field == "messages.0.content.4.image_url" and "at most 4" in error.message


def test_message_of_many_megabytes_arrives(vision: Stub) -> None:
    error = refusal(lambda: render(vision, said("user", image(url_of(b"x" * (40 << 20))))))
    assert error.field == "messages.0.content.0.image_url"


def test_url_of_a_private_address_is_refused_unasked(vision: Stub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://localhost:{server.getsockname()[1]}/x.png"
        error = refusal(lambda: render(vision, said("user", image(url))))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert "address that is not allowed" in error.message
    assert error.field == "messages.0.content.0.image_url"


def test_urls_are_refused_where_they_are_not_allowed(tmp_path: Path) -> None:
    run = RunDir()
    files = {"config.json": CONFIG, "tokenizer.json": TOKENIZER.to_str()}
    folder = write_folder(tmp_path / "m", **files)
    service = ServiceProcess("tokenizer", SERVICE, run.path, ["--model", str(folder)])
    service.start()
    with grpc.insecure_channel(service.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        error = refusal(lambda: render(stub, said("user", image("https://example.com/a.png"))))
    assert "only data URLs" in error.message
    assert service.stop() == 0
    run.close()


def test_refused_images_leave_no_open_files(vision: Stub, service: ServiceProcess) -> None:
    assert service.process is not None
    folder = f"/proc/{service.process.pid}/fd"
    render(vision, said("user", image(picture_url(256, 256, 100))))
    before = len(os.listdir(folder))
    for data, _ in BAD.values():
        large = image(picture_url(256, 256, 100))
        refusal(lambda d=data, i=large: render(vision, said("user", i, image(url_of(d)))))
    assert len(os.listdir(folder)) <= before
