"""The tokens that the tokenizer writes for an image are those that the engine's tower fills."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from services.engine.layers.vision.deepseek import DeepseekVision, DeepseekVisionConfig
from services.engine.layers.vision.parts import Grid
from services.tokenizer.images.deepseek import (
    DeepSeekV4Layout,
    DeepSeekV4Sizing,
    DeepSeekV41Layout,
    DeepSeekV41Sizing,
    Role,
)

SIZES = [(1, 1), (64, 48), (97, 411), (720, 1280), (3000, 4000), (30, 4000), (4000, 30)]


def tower(*, tiled: bool, max_tokens: int) -> DeepseekVision:
    """A tower without weights whose learned marks are the numbers of their roles."""
    config = DeepseekVisionConfig(1, 8, 1, 8, 14, 3, 1e4, max_tokens, hidden=1, tiled=tiled)
    roles = (Role.START, Role.NEWLINE, Role.END, *((Role.PAD,) if tiled else ()))
    marks = tuple(torch.tensor([float(role)]) for role in roles)
    weights = cast(Any, [None] * 6)
    return DeepseekVision(config, *weights[:5], marks, weights[5], torch.float32)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("offset", range(5))
def test_vision_exp_places_every_role_where_the_engine_does(
    size: tuple[int, int], offset: int
) -> None:
    sizing = DeepSeekV4Sizing(14, 3, 384, 147_456, 8)
    vision = tower(tiled=True, max_tokens=384)
    canvas = sizing.frame(*size)
    ids = DeepSeekV4Layout(sizing, 0).tokens(canvas.height, canvas.width, offset)
    assert vision.span_tokens(canvas.height, canvas.width, offset) == len(ids)
    rows, columns = sizing.grid(canvas.height, canvas.width)
    images = torch.full((rows * columns, 1), float(Role.IMAGE))
    grid = Grid.of(canvas.height, canvas.width, 14)
    assert vision.frame(images, grid, offset).flatten().tolist() == ids


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_v41_counts_the_tokens_of_the_engine(size: tuple[int, int]) -> None:
    sizing = DeepSeekV41Sizing(14, 3, 1024, 295_936)
    canvas = sizing.frame(*size)
    ids = DeepSeekV41Layout(sizing, 9).tokens(canvas.height, canvas.width, 5)
    vision = tower(tiled=False, max_tokens=1024)
    assert vision.span_tokens(canvas.height, canvas.width, 5) == len(ids)
