"""The checks of a request's images that need no model: fields, bytes and places."""

from __future__ import annotations

import math
from collections.abc import Sequence

from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.tensor_pb2 import Dtype, Tensor
from warhorse.v1.tokenizer_pb2 import ImageInput

from services.common.errors import ServiceError
from services.common.images import DIGEST_BYTES

MAX_INLINE_BYTES = 64 << 10
MAX_SIDE = 1 << 16  # pixels
OFFSET_UNIT = 256  # of a tensor's place in a region, bytes


def invalid(field: str, problem: str) -> ServiceError:
    """The error of a field that is missing or out of range; `problem` names value and range."""
    reason = ErrorReason.ERROR_REASON_INVALID_FIELD
    return ServiceError(reason, f"{field}: {problem}", field=field)


def check_images(images: Sequence[ImageInput], prompt_tokens: int, takes_images: bool) -> None:
    """Raise ServiceError UNSUPPORTED or INVALID_FIELD, naming the image and its field.

    How many tokens an image needs and whether its digest is right is checked where the model is.
    """
    if images and not takes_images:
        raise ServiceError(
            ErrorReason.ERROR_REASON_UNSUPPORTED, "this model takes no images", field="images"
        )
    free = 0  # first position behind the images so far
    for index, image in enumerate(images):
        field = f"images[{index}]"
        _check_pixels(f"{field}.pixels", image.pixels)
        if image.pixels.WhichOneof("payload") == "shm":
            _check_region(field, image)
        if len(image.digest) != DIGEST_BYTES:
            got = len(image.digest)
            raise invalid(f"{field}.digest", f"has {got} bytes; must have {DIGEST_BYTES}")
        free = _check_place(field, image, free, prompt_tokens)


def _check_place(field: str, image: ImageInput, free: int, prompt_tokens: int) -> int:
    if image.length < 1:
        raise invalid(f"{field}.length", "is 0; must be 1 or more")
    end = image.offset + image.length
    if not free <= image.offset < end <= prompt_tokens:
        raise invalid(
            f"{field}.offset",
            f"is {image.offset} with length {image.length}; the image must lie between tokens "
            f"{free} and {prompt_tokens}",
        )
    return end


def _check_pixels(field: str, pixels: Tensor) -> None:
    if pixels.dtype != Dtype.DTYPE_U8:
        raise invalid(f"{field}.dtype", f"is {pixels.dtype}; must be {Dtype.DTYPE_U8} (DTYPE_U8)")
    shape = list(pixels.shape)
    if len(shape) != 3 or shape[2] != 3 or not all(1 <= side <= MAX_SIDE for side in shape):
        raise invalid(
            f"{field}.shape", f"is {shape}; must be [height, width, 3] with sides 1 to {MAX_SIDE}"
        )
    nbytes = math.prod(shape)
    match pixels.WhichOneof("payload"):
        case "inline":
            got = len(pixels.inline)
            if got != nbytes or got > MAX_INLINE_BYTES:
                raise invalid(
                    f"{field}.inline",
                    f"has {got} bytes; must have {nbytes} and at most {MAX_INLINE_BYTES}",
                )
        case "shm":
            if pixels.shm.nbytes != nbytes:
                raise invalid(f"{field}.shm.nbytes", f"is {pixels.shm.nbytes}; must be {nbytes}")
        case _:
            raise invalid(field, "has no bytes; inline or shm must be set")


def _check_region(field: str, image: ImageInput) -> None:
    """The region must be the one that the tensor lies in, and nobody may be able to change it."""
    region, shm = image.region, image.pixels.shm
    if (region.region_id, region.generation) != (shm.region_id, shm.generation):
        raise invalid(f"{field}.region", "is not the one that pixels.shm names")
    if not region.read_only:
        raise invalid(f"{field}.region.read_only", "is false; must be true")
    if shm.offset % OFFSET_UNIT or shm.offset + shm.nbytes > region.nbytes:
        raise invalid(
            f"{field}.pixels.shm.offset",
            f"is {shm.offset} with {shm.nbytes} bytes; must be a multiple of {OFFSET_UNIT} and lie "
            f"within the {region.nbytes} bytes of the region",
        )
