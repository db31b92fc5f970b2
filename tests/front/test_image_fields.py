"""Every field of an image that can be wrong, as a table."""

from __future__ import annotations

from typing import Any

import pytest
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.tensor_pb2 import Dtype
from warhorse.v1.tokenizer_pb2 import ImageInput

from services.common.errors import ServiceError
from services.engine.requests import RequestLimits, validate
from tests.front.helpers import MAX_MODEL_LEN, MODEL, VOCAB, make_request, set_field

LIMITS = RequestLimits((MODEL,), VOCAB, MAX_MODEL_LEN, takes_images=True)
PROMPT = 40
PIXELS = bytes(range(24))  # 2 x 4 x 3


def inline_image(offset: int = 3, length: int = 5) -> ImageInput:
    image = ImageInput(offset=offset, length=length, digest=b"d" * 32)
    image.pixels.dtype = Dtype.DTYPE_U8
    image.pixels.shape.extend((2, 4, 3))
    image.pixels.inline = PIXELS
    return image


def shared_image(offset: int = 3, length: int = 5) -> ImageInput:
    image = inline_image(offset, length)
    image.pixels.shm.region_id, image.pixels.shm.generation = "r", 9
    image.pixels.shm.offset, image.pixels.shm.nbytes = 256, 24
    image.region.region_id, image.region.generation = "r", 9
    image.region.nbytes, image.region.read_only = 280, True
    return image


def failure(*images: ImageInput) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        validate(make_request([1] * PROMPT, images=list(images)), LIMITS)
    return caught.value


# (field set to value, field named by the error, words of the message)
WRONG_INLINE: list[tuple[str, Any, str, list[str]]] = [
    ("pixels.dtype", Dtype.DTYPE_F32, "pixels.dtype", ["is 1", "DTYPE_U8"]),
    ("pixels.dtype", None, "pixels.dtype", ["is 0", "DTYPE_U8"]),
    ("pixels.shape", [2, 4], "pixels.shape", ["[2, 4]", "[height, width, 3]"]),
    ("pixels.shape", [2, 3, 4], "pixels.shape", ["[2, 3, 4]"]),
    ("pixels.shape", [0, 4, 3], "pixels.shape", ["[0, 4, 3]", "1 to 65536"]),
    ("pixels.shape", [-2, -4, 3], "pixels.shape", ["[-2, -4, 3]"]),
    ("pixels.shape", [1, 65537, 3], "pixels.shape", ["65537", "65536"]),
    ("pixels.inline", PIXELS[:-1], "pixels.inline", ["23 bytes", "must have 24"]),
    ("pixels.inline", None, "pixels", ["inline or shm"]),
    ("digest", b"d" * 31, "digest", ["31 bytes", "must have 32"]),
    ("digest", None, "digest", ["0 bytes", "must have 32"]),
    ("length", 0, "length", ["is 0", "1 or more"]),
    ("offset", 36, "offset", ["36", "length 5", "0 and 40"]),
    ("length", 4294967295, "offset", ["4294967295", "0 and 40"]),
]
WRONG_SHARED: list[tuple[str, Any, str, list[str]]] = [
    ("pixels.shm.nbytes", 23, "pixels.shm.nbytes", ["is 23", "must be 24"]),
    ("pixels.shm.offset", 128, "pixels.shm.offset", ["is 128", "multiple of 256"]),
    ("pixels.shm.offset", 512, "pixels.shm.offset", ["is 512", "the 280 bytes"]),
    ("region.nbytes", 279, "pixels.shm.offset", ["is 256 with 24 bytes", "the 279 bytes"]),
    ("region.region_id", "s", "region", ["not the one"]),
    ("region.generation", 8, "region", ["not the one"]),
    ("region", None, "region", ["not the one"]),
    ("region.read_only", False, "region.read_only", ["must be true"]),
]


@pytest.mark.parametrize(("path", "value", "field", "words"), WRONG_INLINE)
def test_wrong_inline_image_is_refused(path: str, value: Any, field: str, words: list[str]) -> None:
    image = inline_image()
    set_field(image, path, value)
    check(failure(image), 0, field, words)


@pytest.mark.parametrize(("path", "value", "field", "words"), WRONG_SHARED)
def test_wrong_shared_image_is_refused(path: str, value: Any, field: str, words: list[str]) -> None:
    image = shared_image()
    set_field(image, path, value)
    check(failure(inline_image(0, 3), image), 1, field, words)


def check(error: ServiceError, index: int, field: str, words: list[str]) -> None:
    assert error.reason == ErrorReason.ERROR_REASON_INVALID_FIELD
    assert error.field == f"images[{index}].{field}"
    for word in (error.field, *words):
        assert word in error.message


def test_images_out_of_order_or_on_top_of_each_other_are_refused() -> None:
    check(failure(inline_image(8), inline_image(3)), 1, "offset", ["is 3", "13 and 40"])
    check(failure(inline_image(3), inline_image(7)), 1, "offset", ["is 7", "8 and 40"])


def test_more_inline_bytes_than_allowed_are_refused() -> None:
    image = inline_image()
    set_field(image, "pixels.shape", [148, 148, 3])
    image.pixels.inline = bytes(148 * 148 * 3)
    check(failure(image), 0, "pixels.inline", ["65712 bytes", "at most 65536"])


def test_neighbouring_images_that_fill_the_prompt_pass() -> None:
    images = [inline_image(0, 20), shared_image(20, 20)]
    validate(make_request([1] * PROMPT, images=images), LIMITS)
