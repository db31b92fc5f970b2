"""The DeepSeek tower equals the vendor's own run on the nano checkpoint of V4.1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

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
        names = ("patches", "vit_out", "aligner_out", "embed")
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
def test_merged_embeddings_equal_the_goldens(
    tower: DeepseekVision, goldens: dict[str, torch.Tensor]
) -> None:
    assert tower.span_tokens(4 * 14, 7 * 14, offset=9) == SPAN.stop - SPAN.start
    values = tower.frame(goldens["aligner_out"], GRID, offset=9)
    torch.testing.assert_close(values, goldens["embed"][SPAN], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["wide", "tall", "big"])
def test_patches_equal_those_of_the_vendors_preprocessing(
    tower: DeepseekVision, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The golden pictures are padded here, not resized: only those whose size is final count."""
    with np.load(GOLDENS / "image_preprocess.npz") as data:
        rgb, patches = torch.from_numpy(data[f"{name}.rgb"]), data[f"{name}.patches"]
        grid = data[f"{name}.grid"].tolist()
    print(name, rgb.shape, patches.shape, grid)
