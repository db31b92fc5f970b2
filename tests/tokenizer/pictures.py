"""Small images, files and URLs for tests."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image


def noise(height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """uint8 [height, width, 3] that no two seeds share."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def file_of(
    picture: npt.NDArray[np.uint8] | Image.Image, kind: str = "PNG", **options: Any
) -> bytes:
    """The bytes of an image file."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def url_of(data: bytes, media: str = "image/png") -> str:
    """A data URL."""
    return f"data:{media};base64,{base64.b64encode(data).decode()}"
