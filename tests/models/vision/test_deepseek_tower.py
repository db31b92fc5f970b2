"""The DeepSeek tower equals the vendor's own run on the nano checkpoint of V4.1."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from services.engine.layers.vision.deepseek import DeepseekVision
from services.engine.layers.vision.parts import Grid
from services.engine.models.vision_config import deepseek_v41_vision
from tests.models.vision.towers import picture, reader_of

GOLDENS = Path(__file__).parents[2] / "goldens" / "deepseek_v41"
HIDDEN = 128
GRID = Grid(rows=4, columns=7)  # of the golden image; 2 x 3 tokens from position 9 on
SPAN = slice(9, 19)
TOLERANCE = 1e-4  # absolute, fp32


@pytest.fixture(scope="module")
def tower() -> DeepseekVision:
    checkpoint, reader = reader_of(GOLDENS)
    config = deepseek_v41_vision(checkpoint.config, HIDDEN)
    assert config is not None
    return DeepseekVision.load(reader, config, torch.float32)


@pytest.fixture(scope="module")
def goldens() -> dict[str, torch.Tensor]:
    with np.load(GOLDENS / "activations_exact.npz") as data:
        names = ("patches", "vit_out", "aligner_out")
        return {name: torch.from_numpy(data[f"image.{name}"]) for name in names}


@torch.inference_mode()
def test_features_and_tokens_equal_the_goldens(
    tower: DeepseekVision, goldens: dict[str, torch.Tensor]
) -> None:
    features = tower.encode(goldens["patches"], GRID)
    torch.testing.assert_close(features, goldens["vit_out"], rtol=0, atol=TOLERANCE)
    tokens = tower.align(features, GRID)
    torch.testing.assert_close(tokens, goldens["aligner_out"], rtol=0, atol=TOLERANCE)


@torch.inference_mode()
def test_v41_spans_lie_in_the_order_of_the_goldens(
    tower: DeepseekVision, goldens: dict[str, torch.Tensor]
) -> None:
    assert tower.span_tokens(4 * 14, 7 * 14, offset=9) == SPAN.stop - SPAN.start
    tokens = iter(goldens["aligner_out"])
    start, newline, end = (mark.float() for mark in tower.marks)
    roles = json.loads((GOLDENS / "cases.json").read_text())["image"]["token_types"][SPAN]
    marks = {0: start, 2: newline, 3: end}
    expected = [next(tokens) if role == 1 else marks[role] for role in roles]
    values = tower.frame(goldens["aligner_out"], GRID, offset=9)
    assert torch.equal(values, torch.stack(expected))


@pytest.mark.parametrize("name", ["wide", "tall", "big"])
def test_patches_equal_those_of_the_vendors_preprocessing(tower: DeepseekVision, name: str) -> None:
    with np.load(GOLDENS / "image_preprocess.npz") as data:
        rgb, bits = data[f"{name}.rgb"], data[f"{name}.patches"]
        rows, columns = data[f"{name}.grid"][:2].tolist()
    grey = (127, 127, 127)
    size = (14 * columns, 14 * rows)
    fitted = ImageOps.pad(Image.fromarray(rgb), size, Image.Resampling.BICUBIC, color=grey)
    patches = tower.patches(torch.from_numpy(np.array(fitted)))
    expected = torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(patches, expected)


def tiled(tower: DeepseekVision) -> DeepseekVision:
    """The same tower with the layout of Vision-Exp; PAD is all sevens."""
    config = replace(tower.config, tiled=True)
    return replace(tower, config=config, marks=(*tower.marks, torch.full((HIDDEN,), 7.0)))


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 10])
@pytest.mark.parametrize(("height", "width"), [(42, 42), (98, 126), (126, 84), (14, 70)])
def test_vision_exp_begins_the_grid_on_a_window_and_fills_windows(
    tower: DeepseekVision, height: int, width: int, offset: int
) -> None:
    """Written out place by place from the rule: 2 x 2 tiles, one after the other."""
    grid = Grid(height // 14, width // 14)
    rows, columns = -(-grid.rows // 3), -(-grid.columns // 3)
    tokens = torch.arange(rows * columns).float()[:, None].expand(-1, HIDDEN) + 100
    start, newline, end, pad = (mark.float() for mark in tiled(tower).marks)

    def cell(row: int, column: int) -> torch.Tensor:
        if row == rows:
            return pad
        return newline if column == columns else tokens[row * columns + column]

    expected = [pad] * ((3 - offset) % 4) + [start]
    for row in range(0, rows, 2):
        for column in range(columns + 1):
            expected += [cell(row, column), cell(row + 1, column)]
    while (offset + len(expected)) % 4:
        expected.append(pad)
    expected.append(end)
    assert tiled(tower).span_tokens(height, width, offset) == len(expected)
    assert torch.equal(tiled(tower).frame(tokens, grid, offset), torch.stack(expected))


def test_an_image_that_the_tower_does_not_take_is_refused(tower: DeepseekVision) -> None:
    with pytest.raises(ValueError, match="57 x 98 pixels; both sides must be multiples of 14"):
        tower.span_tokens(57, 98, offset=0)
    with pytest.raises(ValueError, match="has 82 tokens; the model takes at most 64"):
        tower.span_tokens(8 * 42, 9 * 42, offset=0)


@torch.inference_mode()
def test_an_image_is_encoded_from_its_own_pixels(tower: DeepseekVision) -> None:
    first, second = picture(56, 98, seed=1), picture(56, 98, seed=1)
    second[40, 70, 2] ^= 1
    values = [tower.embed(p, offset=0) for p in (first, second, first)]
    assert torch.equal(values[0], values[2])
    assert not torch.equal(values[0], values[1])
