"""Images of a prompt, as the engine knows them: where they lie and where their pixels are."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Placeholder tokens `offset` to `offset + length` stand for the image with this digest.

    `height` and `width` are those of its pixels.
    """

    offset: int
    length: int
    digest: bytes
    height: int = 0
    width: int = 0

    @property
    def end(self) -> int:
        """Position after the last placeholder."""
        return self.offset + self.length


class ImageSource(Protocol):
    """Pixels of the images of live requests."""

    def pixels(self, digest: bytes) -> Pixels:
        """uint8 [height, width, 3]; KeyError where no live request has such an image."""
        ...


class ImageStore:
    """Owns the pixels of live requests, each picture once. Implements `ImageSource`. One caller."""

    def __init__(self) -> None:
        self._pixels: dict[bytes, Pixels] = {}
        self._holders: dict[str, tuple[bytes, ...]] = {}  # request id -> digests

    def __len__(self) -> int:
        return len(self._pixels)

    def pixels(self, digest: bytes) -> Pixels:
        """As `ImageSource.pixels`."""
        return self._pixels[digest]

    def hold(self, request_id: str, images: Mapping[bytes, Pixels]) -> None:
        """Keep the pictures of a request, by digest."""
        if images:
            self._holders[request_id] = tuple(images)
            self._pixels = {**images, **self._pixels}

    def retain(self, live: Container[str]) -> None:
        """Drop the pictures that no request of `live` has."""
        ended = [request_id for request_id in self._holders if request_id not in live]
        if not ended:
            return
        for request_id in ended:
            del self._holders[request_id]
        held = {digest for digests in self._holders.values() for digest in digests}
        self._pixels = {d: pixels for d, pixels in self._pixels.items() if d in held}
