"""The GLM tower equals `transformers` on the same weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextVisionConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextVisionModel

from services.common.checkpoint import CheckpointError
from services.engine.layers.vision.glm import NORM_EPS, GlmVision
from services.engine.layers.vision.parts import Grid
from services.engine.models.vision_config import glm_vision
from tests.models.tiny import write_folder
from tests.models.vision.towers import picture, reader_of

HIDDEN = 128
TOLERANCE = 1e-5  # absolute, fp32; tokens have a standard deviation of 0.13
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 96,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": HIDDEN,
    "projection_intermediate_size": 80,
    "swiglu_limit": 0.5,  # so that the clamps act
    "attention_bias": True,
    "hidden_act": "silu",
}


def oracle(eps: float) -> Glm5NextVisionModel:
    model = Glm5NextVisionModel(Glm5NextVisionConfig(**VISION, rms_norm_eps=eps)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            few = parameter.dim() == 1
            parameter.copy_(noise * 0.3 + 1 if few else noise / math.sqrt(parameter[0].numel()))
    return model


def inputs(patches: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches in blocks of 2 x 2, two equal frames each, and their grid, for the oracle."""
    blocks = patches.view(grid.rows // 2, 2, grid.columns // 2, 2, 3, 1, 14, 14).transpose(1, 2)
    flat = blocks.expand(-1, -1, -1, -1, -1, 2, -1, -1).flatten(0, 3).flatten(1)
    return flat, torch.tensor([[1, grid.rows, grid.columns]])


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> GlmVision:
    folder = tmp_path_factory.mktemp("glm")
    tensors = {f"model.visual.{n}": t.clone() for n, t in oracle(1e-6).state_dict().items()}
    config = {"model_type": "glm5_next", "vision_config": {**VISION, "rms_norm_eps": 1e-5}}
    write_folder(folder, config, tensors, 1)
    checkpoint, reader = reader_of(folder)
    vision = glm_vision(checkpoint, HIDDEN)
    assert vision is not None
    return GlmVision.load(reader, vision, torch.float32)


@torch.inference_mode()
@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(6, 10), Grid(8, 4)])
def test_tokens_equal_transformers(tower: GlmVision, grid: Grid) -> None:
    patches = torch.randn(grid.rows * grid.columns, 3, 14, 14, generator=torch.manual_seed(3))
    expected = oracle(NORM_EPS)(*inputs(patches, grid)).pooler_output
    found = tower.merge(tower.encode(patches, grid), grid)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@torch.inference_mode()
def test_pixels_are_normalised_as_the_published_processor_does(tower: GlmVision) -> None:
    """Mean and deviation are those that OpenAI published with CLIP."""
    pixels = picture(56, 84, seed=2)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])
    normal = (pixels / 255 - mean) / std
    patches = normal.unfold(0, 14, 14).unfold(1, 14, 14).flatten(0, 1)
    expected = oracle(NORM_EPS)(*inputs(patches, Grid(4, 6))).pooler_output
    torch.testing.assert_close(tower.embed(pixels, 0), expected, rtol=0, atol=TOLERANCE)


def test_the_file_of_a_checkpoint_may_name_other_means(tower: GlmVision, tmp_path: Path) -> None:
    config = {"model_type": "glm5_next", "vision_config": VISION}
    write_folder(tmp_path, config, {"x": torch.zeros(1)}, 1)
    checkpoint, _ = reader_of(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text('{"image_mean": [0.5, 0.25, 0.125], "image_std": [1, 2, 4]}')
    vision = glm_vision(checkpoint, HIDDEN)
    assert vision is not None and vision.normalisation.mean == (0.5, 0.25, 0.125)
    path.write_text('{"image_mean": [0.5, 0.25], "image_std": [1, 2, 4]}')
    with pytest.raises(CheckpointError, match=r"image_mean is \[0.5, 0.25\], expected three"):
        glm_vision(checkpoint, HIDDEN)


def test_span_is_the_merged_grid(tower: GlmVision) -> None:
    assert tower.span_tokens(56, 84, offset=5) == 6
    with pytest.raises(ValueError, match="56 x 70 pixels; both sides must be multiples of 28"):
        tower.span_tokens(56, 70, offset=5)
