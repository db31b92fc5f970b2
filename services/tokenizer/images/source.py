"""Data URLs: the bytes of images that travel inside the request."""

from __future__ import annotations

import base64
import binascii

from services.tokenizer.images.errors import ImageError

MEDIA_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_MAX_ECHO = 64


def is_data_url(url: str) -> bool:
    """Whether the image is in the URL itself."""
    return url[:5].lower() == "data:"


def data_of(url: str, max_bytes: int) -> bytes:
    """Return the bytes of a data URL. Raises ImageError.

    The media type must be one of MEDIA_TYPES, the content is told from its own bytes later.
    """
    head, comma, text = url.partition(",")
    media, *parameters = head[5:].lower().split(";")
    if not comma or parameters[-1:] != ["base64"]:
        raise ImageError("a data URL reads data:image/png;base64, followed by base64 text")
    if media.strip() not in MEDIA_TYPES:
        known = ", ".join(MEDIA_TYPES)
        raise ImageError(f"the media type must be one of {known}; got {media[:_MAX_ECHO]!r}")
    if len(text) * 3 // 4 > max_bytes + 2:
        raise too_large(max_bytes)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError("the data URL holds no valid base64 text") from error
    if not data:
        raise ImageError("the data URL holds no bytes")
    if len(data) > max_bytes:
        raise too_large(max_bytes)
    return data


def too_large(max_bytes: int) -> ImageError:
    """Return the error of an image file above the limit."""
    return ImageError(f"the image file has more than the {max_bytes} bytes that are allowed")
