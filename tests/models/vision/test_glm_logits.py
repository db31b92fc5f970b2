"""Logits of GLM with images equal `transformers` on the decoded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.checkpoints.nano.glm import build_nano
from services.engine.models.registry import load_model
from tests.models.glm5_next.oracle import oracle_of
from tests.models.vision.image_runner import ImageRunner, span_of
from tests.models.vision.towers import picture

IMAGE = 500  # image_token_id of the nano checkpoint
PATCH = 14
SIZES = ((4, 6), (6, 4))  # of the images, in patches
TOLERANCE = 1e-4  # absolute, fp32; logits have a standard deviation of 1
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nano(tmp_path_factory.mktemp("glm") / "fp8", "fp8")


def text(count: int, seed: int) -> list[int]:
    return torch.randint(2, 480, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle_patches(pixels: torch.Tensor) -> torch.Tensor:
    """Normalised patches in blocks of 2 x 2, two equal frames each."""
    normal = (pixels / 255 - MEAN) / STD
    rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    cells = normal.view(rows // 2, 2, PATCH, columns // 2, 2, PATCH, 3)
    blocks = cells.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, PATCH, PATCH)
    return blocks.expand(-1, -1, 2, -1, -1).flatten(1)


def test_logits_with_two_images_equal_transformers(nano: Path) -> None:
    images, ids = {}, text(7, seed=1)
    for number, (rows, columns) in enumerate(SIZES):
        pixels = picture(rows * PATCH, columns * PATCH, seed=number)
        images[span_of(pixels, len(ids), rows * columns // 4)] = pixels
        ids += [IMAGE] * (rows * columns // 4) + text(30, seed=2 + number)
    model: Any = load_model(nano, device=torch.device("cpu"), compute_dtype=torch.float32)
    whole = ImageRunner([model]).run_images(ids, images, len(ids))
    with torch.inference_mode():
        output = oracle_of(nano)(
            input_ids=torch.tensor([ids]),
            pixel_values=torch.cat([oracle_patches(p) for p in images.values()]),
            image_grid_thw=torch.tensor([[1, *size] for size in SIZES]),
        )
    assert output.logits[0].std() > 0.5
    torch.testing.assert_close(whole, output.logits[0], rtol=0, atol=TOLERANCE)
    assert torch.equal(ImageRunner([model]).run_images(ids, images, 5), whole)
