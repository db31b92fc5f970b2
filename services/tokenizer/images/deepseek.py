"""Sizes and token layouts of images in the two DeepSeek families.

Sizes follow DeepSeek's published `image_processor.py` step by step, roundings included: enlarge to
`min_pixels` (truncating), round up to patches, and only where the tokens exceed the cap shrink the
enlarged, not yet rounded size, rounding down to patches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum

from services.tokenizer.images.sizing import Fit, Frame


@dataclass(frozen=True, slots=True)
class _DeepSeek(ABC):
    """What both DeepSeek families share: enlarge, round up to patches, shrink into the cap.

    patch: pixels of a side per patch; downsample: patches of a side per token. max_aspect: width
    per height beyond which the image is squeezed, None for no bound.
    """

    patch: int
    downsample: int
    max_tokens: int
    min_pixels: int
    max_aspect: int | None = None

    @property
    def cell(self) -> int:
        """Pixels of a side per token."""
        return self.patch * self.downsample

    def frame(self, height: int, width: int) -> Frame:
        """As `Sizing.frame`."""
        squeezed = self.max_aspect is not None and width >= self.max_aspect * height
        canvas = self._canvas(height, width)
        return Frame(*canvas, Fit.STRETCH if squeezed else Fit.CENTRE)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens of a canvas in pixels; patches beyond it count as one."""
        return self._cells(height), self._cells(width)

    def _cells(self, pixels: int) -> int:
        return -(-(pixels // self.patch) // self.downsample)

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        if self.max_aspect is not None:
            width = min(width, height * self.max_aspect)
        if height * width < self.min_pixels:
            scale = (self.min_pixels / (height * width)) ** 0.5
            height, width = int(height * scale), int(width * scale)
        canvas = (self._patches(height), self._patches(width))
        return self._shrunk(height, width, canvas)

    def _patches(self, pixels: int) -> int:
        return math.ceil(pixels / self.patch) * self.patch

    def _floored(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """The largest canvas of whole patches with this aspect inside a grid of tokens."""
        scale = min(columns * self.cell / width, rows * self.cell / height)
        return (
            math.floor(height * scale / self.patch) * self.patch,
            math.floor(width * scale / self.patch) * self.patch,
        )

    def _ideal(self, height: int, width: int, tokens: int) -> tuple[float, float]:
        """Rows and columns, not rounded, of h (w + 1) + 2 = tokens with h / w as the image has."""
        aspect = height / width
        columns = math.sqrt((tokens - 2) / aspect + 0.25) - 0.5
        return columns * aspect, columns

    @abstractmethod
    def tokens(self, height: int, width: int) -> int:
        """Tokens of a canvas in pixels, from START to END."""

    @abstractmethod
    def _shrunk(self, height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
        """The canvas, or a smaller one where it costs more tokens than the cap."""


@dataclass(frozen=True, slots=True)
class DeepSeekV41Sizing(_DeepSeek):
    """V4.1: h (w + 1) + 2 tokens for a grid of h rows and w columns, in reading order."""

    def tokens(self, height: int, width: int) -> int:
        """Tokens of a canvas in pixels, with START and END."""
        rows, columns = self.grid(height, width)
        return rows * (columns + 1) + 2

    def _shrunk(self, height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
        if self.tokens(*canvas) <= self.max_tokens:
            return canvas
        rows, columns = self._ideal(height, width, self.max_tokens)
        if columns < 1:
            return (self.max_tokens - 2) // 2 * self.cell, self.cell
        if rows < 1:
            return self.cell, (self.max_tokens - 3) * self.cell
        return self._floored(height, width, math.floor(rows), math.floor(columns))


@dataclass(frozen=True, slots=True)
class DeepSeekV4Sizing(_DeepSeek):
    """Vision-Exp: an even number of rows, laid out in 2 x 2 tiles that fill compressed windows.

    window: tokens of a compressed window. START stands on the last place of one, behind up to
    window - 1 PADs, so that the grid begins with a new one.
    """

    window: int = 4

    def tokens(self, height: int, width: int) -> int:
        """Tokens of a canvas in pixels, from START to END, without leading PADs."""
        rows, columns = self.grid(height, width)
        inside = (rows + rows % 2) * (columns + 1)
        return inside + inside % self.window + 2

    def leading(self, offset: int) -> int:
        """PADs in front of START when the image begins at prompt position `offset`."""
        return self.window - 1 - offset % self.window

    def _shrunk(self, height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
        cap = self.max_tokens - (self.window - 1)
        budget = cap
        while self.tokens(*canvas) > cap:
            canvas = self._solved(height, width, budget)
            budget -= 1
        return canvas

    def _solved(self, height: int, width: int, budget: int) -> tuple[int, int]:
        rows, columns = self._ideal(height, width, budget)
        if columns < 1:
            even = (budget - 2) // 2 // 2 * 2
            return even * self.cell, self.cell
        if rows < 2:
            return 2 * self.cell, ((budget - 2) // 2 - 1) * self.cell
        even = math.floor(rows) // 2 * 2
        return self._floored(height, width, even, math.floor(columns))


@dataclass(frozen=True, slots=True)
class DeepSeekV41Layout:
    """V4.1: every place of a span carries the same id; roles follow from the image's size."""

    sizing: DeepSeekV41Sizing
    token_id: int

    def tokens(self, height: int, width: int, offset: int) -> list[int]:
        """START, (IMAGE x w, NEWLINE) x h, END, all as `token_id`; `offset` has no influence."""
        return [self.token_id] * self.sizing.tokens(height, width)


class Role(IntEnum):
    """Tokens of a Vision-Exp image, in the order of their reserved ids."""

    START = 0
    PAD = 1
    IMAGE = 2
    NEWLINE = 3
    END = 4


@dataclass(frozen=True, slots=True)
class DeepSeekV4Layout:
    """Vision-Exp: five reserved ids from `first_id` on, one per role."""

    sizing: DeepSeekV4Sizing
    first_id: int

    def tokens(self, height: int, width: int, offset: int) -> list[int]:
        """Leading PADs, START, the grid in tiles of 2 x 2, trailing PADs, END."""
        grid = self._grid(*self.sizing.grid(height, width))
        leading = [Role.PAD] * self.sizing.leading(offset)
        trailing = [Role.PAD] * (len(grid) % self.sizing.window)
        roles = [*leading, Role.START, *grid, *trailing, Role.END]
        return [self.first_id + role for role in roles]

    @staticmethod
    def _grid(rows: int, columns: int) -> list[Role]:
        """Rows of IMAGE and NEWLINE, a row of PAD under an odd number of them, two by two."""
        lines = [[Role.IMAGE] * columns + [Role.NEWLINE] for _ in range(rows)]
        lines += [[Role.PAD] * (columns + 1)] * (rows % 2)
        return [
            role
            for upper, lower in zip(lines[::2], lines[1::2], strict=True)
            for pair in zip(upper, lower, strict=True)
            for role in pair
        ]
