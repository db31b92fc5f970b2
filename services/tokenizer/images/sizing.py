"""Which size an image gets for a family's vision tower, and how it is fitted into it.

Pure arithmetic over sizes; `decode_worker` applies the result. The formulas here are those of the
`transformers` processors Qwen2VL and Glm5Next; those of DeepSeek are in `deepseek`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

# `detail: "low"`: the image is sized as if it had no more pixels than this (512 x 512).
LOW_DETAIL_PIXELS = 512 * 512
_MAX_ASPECT = 200


class ImageSizeError(Exception):
    """No size of the model fits this image; the text says why."""


class Fit(StrEnum):
    """How the content comes onto the canvas."""

    # Resized to the canvas, whatever its aspect.
    STRETCH = "stretch"
    # Resized with its aspect kept, in the middle of a grey canvas.
    CENTRE = "centre"
    # Resized to the content's size, in the upper left corner of a black canvas.
    CORNER = "corner"


@dataclass(frozen=True, slots=True)
class Frame:
    """A canvas of `height` x `width` pixels; with CORNER the size of the content on it."""

    height: int
    width: int
    fit: Fit = Fit.STRETCH
    content_height: int = 0
    content_width: int = 0


class Sizing(Protocol):
    """The sizes of one family."""

    def frame(self, height: int, width: int) -> Frame:
        """The canvas for an image of this size, in pixels. Raises ImageSizeError."""
        ...


def framed(sizing: Sizing, height: int, width: int, detail: str) -> Frame:
    """The frame for an image; "low" counts it as one of at most LOW_DETAIL_PIXELS."""
    if detail == "low" and height * width > LOW_DETAIL_PIXELS:
        scale = math.sqrt(LOW_DETAIL_PIXELS / (height * width))
        height, width = max(1, int(height * scale)), max(1, int(width * scale))
    return sizing.frame(height, width)


@dataclass(frozen=True, slots=True)
class SmartResize:
    """Qwen: both sides multiples of `factor`, the area within bounds, the aspect nearly kept.

    factor: pixels of a side per token, patch size times merge size.
    """

    factor: int
    min_pixels: int
    max_pixels: int

    def frame(self, height: int, width: int) -> Frame:
        """As `Sizing.frame`; refuses images more than 200 times as long as they are wide."""
        if max(height, width) > _MAX_ASPECT * min(height, width):
            raise ImageSizeError(
                f"has {width} x {height} pixels; one side may be at most {_MAX_ASPECT} times the "
                "other"
            )
        return Frame(*self._target(height, width))

    def _target(self, height: int, width: int) -> tuple[int, int]:
        factor = self.factor
        rows, columns = round(height / factor), round(width / factor)
        area = rows * columns * factor**2
        if area > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / factor))
            columns = max(1, math.floor(width / shrink / factor))
        elif area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * grow / factor)
            columns = math.ceil(width * grow / factor)
        return rows * factor, columns * factor


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """GLM: a canvas of whole tokens within a budget, the content in its upper left corner.

    factor: pixels of a side per token. Content is enlarged only when the image has fewer pixels
    than min_tokens tokens.
    """

    factor: int
    min_tokens: int
    max_tokens: int

    def frame(self, height: int, width: int) -> Frame:
        """As `Sizing.frame`."""
        canvas_height, canvas_width = self._canvas(height, width)
        scale = min(canvas_height / height, canvas_width / width)
        if height * width >= self.factor**2 * self.min_tokens:
            scale = min(1.0, scale)
        return Frame(
            canvas_height,
            canvas_width,
            Fit.CORNER,
            max(1, min(canvas_height, math.floor(height * scale))),
            max(1, min(canvas_width, math.floor(width * scale))),
        )

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = self._tokens(height), self._tokens(width)
        if rows * columns < self.min_tokens:
            scale = math.sqrt(self.min_tokens * self.factor**2 / (height * width))
            rows = self._tokens(max(1, math.ceil(height * scale)))
            columns = self._tokens(max(1, math.ceil(width * scale)))
        if rows * columns > self.max_tokens:
            rows, columns = self._within_budget(height, width)
        return rows * self.factor, columns * self.factor

    def _within_budget(self, height: int, width: int) -> tuple[int, int]:
        """The grid of the tallest content, found by bisection, that the budget allows."""
        low, high, best = 1, height, (1, 1)
        while low <= high:
            middle = (low + high) // 2
            grid = (
                self._tokens(middle),
                self._tokens(max(1, math.floor(width * middle / height))),
            )
            if grid[0] * grid[1] <= self.max_tokens:
                best, low = grid, middle + 1
            else:
                high = middle - 1
        return best

    def _tokens(self, pixels: int) -> int:
        return math.ceil(pixels / self.factor)
