"""Images of a prompt, as the engine knows them: where they lie and where their pixels are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


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

    def pixels(self, digest: bytes) -> npt.NDArray[np.uint8]:
        """uint8 [height, width, 3]; KeyError where no live request has such an image."""
        ...
