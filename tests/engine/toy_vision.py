"""The toy model with images: a placeholder counts as the token that its pixel stands for.

An image of h x w pixels has h * w placeholders, and pixel i stands for token `red % VOCAB`. The
greedy output of a prompt with images is therefore that of the prompt with these tokens instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from services.common.images import image_digest
from services.engine.cache.spec import CacheGroup, CachePools
from services.engine.images import ImageSpan, Pixels
from services.engine.runtime.batch import ImageBatch, StepBatch
from tests.engine.toy_model import ALL_GROUPS, VOCAB, ToyModel, reference_greedy

PLACEHOLDER = 3
MAX_SIDE = 20


@dataclass
class ToyVision:
    """Counts what it encodes."""

    atomic_spans: bool
    encoded: list[tuple[int, int]] = field(default_factory=list)  # sizes
    rope_lag = 0

    def span_tokens(self, height: int, width: int, offset: int) -> int:
        if max(height, width) > MAX_SIDE:
            raise ValueError(f"{height} x {width} pixels, at most {MAX_SIDE} a side")
        return height * width

    def embed(self, pixels_HW3: torch.Tensor, offset: int) -> torch.Tensor:
        self.encoded.append((pixels_HW3.shape[0], pixels_HW3.shape[1]))
        return (pixels_HW3[..., 0].reshape(-1, 1).long() % VOCAB).float()

    def rope_positions(
        self, images: Sequence[ImageSpan], start: int, count: int
    ) -> torch.Tensor | None:
        return None


class ToyVisionModel(ToyModel):
    """With `atomic` every step is checked to hold whole images."""

    def __init__(self, groups: tuple[CacheGroup, ...] = ALL_GROUPS, *, atomic: bool = False):
        super().__init__(groups, ngram=False)
        self.vision = ToyVision(atomic)

    def forward(
        self, batch: StepBatch, pools: CachePools, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        if batch.images is not None:
            if self.vision.atomic_spans:
                check_whole(batch, batch.images)
            tokens = batch.images.values_RH[:, 0].long()
            ids = batch.token_ids_T.index_copy(0, batch.images.rows_R, tokens)
            batch = replace(batch, token_ids_T=ids)
        return super().forward(batch, pools, hidden)


def check_whole(batch: StepBatch, images: ImageBatch) -> None:
    """Every image with a token in the step has all of its tokens in it."""
    rows = set(images.rows_R.tolist())
    positions = batch.positions_T.tolist()
    for row in sorted(rows):
        first, last = int(images.span_first_T[row]), int(images.span_last_T[row])
        for position in range(first, last + 1):
            other = row - positions[row] + position
            assert other in rows and positions[other] == position, f"span {first}..{last} is cut"


@dataclass(frozen=True)
class Page:
    """A prompt with pictures, and the tokens that the toy model sees."""

    tokens: tuple[int, ...]
    images: tuple[ImageSpan, ...]
    pixels: dict[bytes, Pixels]

    @classmethod
    def of(cls, *pieces: Sequence[int] | Pixels) -> Page:
        """Pieces are lists of tokens and pictures."""
        tokens: list[int] = []
        images: list[ImageSpan] = []
        pixels: dict[bytes, Pixels] = {}
        for piece in pieces:
            if isinstance(piece, np.ndarray):
                height, width, _ = piece.shape
                digest = image_digest(piece)
                images.append(ImageSpan(len(tokens), height * width, digest, height, width))
                pixels[digest] = piece
                tokens += [PLACEHOLDER] * (height * width)
            else:
                tokens += piece
        return cls(tuple(tokens), tuple(images), pixels)

    def greedy(self, count: int, groups: tuple[CacheGroup, ...] = ALL_GROUPS) -> list[int]:
        """The reference output."""
        seen = list(self.tokens)
        for image in self.images:
            red = self.pixels[image.digest][..., 0].reshape(-1)
            seen[image.offset : image.end] = [int(v) % VOCAB for v in red]
        return reference_greedy(seen, count, groups, ngram=False)


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    """uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
