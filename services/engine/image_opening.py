"""From the images of a request to verified pixels; used inside the core process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.tokenizer_pb2 import ImageInput

from services.common.errors import ServiceError
from services.common.images import image_digest
from services.common.shm import open_region
from services.engine.images import Pixels
from services.engine.scheduler.messages import RequestRefused

# The owner of a region ended, began a new life, or dropped the picture.
_GONE = (ErrorReason.ERROR_REASON_STALE_GENERATION, ErrorReason.ERROR_REASON_ENGINE_LOST)


class ImageOpener:
    """Maps regions and compares digests. `run_dir` is where the sockets of their brokers are."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def open(self, images: Sequence[ImageInput]) -> dict[bytes, Pixels]:
        """Pixels by digest of images whose fields the front has checked.

        They lie in the region itself, which stays mapped as long as they live. Raises
        RequestRefused: STALE_GENERATION where a region is gone (the same request, rendered anew,
        may pass), INVALID_FIELD or LAYOUT_MISMATCH where it is not what was announced.
        """
        return {
            image.digest: self._verified(f"images[{index}]", image)
            for index, image in enumerate(images)
        }

    def _verified(self, field: str, image: ImageInput) -> Pixels:
        flat = self._bytes(field, image)
        height, width, channels = image.pixels.shape
        pixels = flat.reshape(height, width, channels)
        if image_digest(pixels) != image.digest:
            raise RequestRefused(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"{field}.digest: is not that of the pixels",
                field=f"{field}.digest",
            )
        return pixels

    def _bytes(self, field: str, image: ImageInput) -> Pixels:
        if image.pixels.WhichOneof("payload") == "inline":
            return np.frombuffer(image.pixels.inline, dtype=np.uint8)
        shm = image.pixels.shm
        try:
            region = open_region(image.region, self._run_dir)
        except ServiceError as error:
            raise _refused(f"{field}.region", error) from error
        with region:
            return region.array(np.uint8)[shm.offset : shm.offset + shm.nbytes]


def _refused(field: str, error: ServiceError) -> RequestRefused:
    if error.reason in _GONE:
        return RequestRefused(
            ErrorReason.ERROR_REASON_STALE_GENERATION,
            f"{field}: the picture is not there any more; render the conversation again",
            field=field,
        )
    return RequestRefused(error.reason, f"{field}: {error.message}", field=field)
