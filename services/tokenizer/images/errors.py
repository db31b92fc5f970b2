"""The one way in which an image is refused."""

from __future__ import annotations


class ImageError(Exception):
    """An image that a request holds cannot be used; the text is for the client."""
