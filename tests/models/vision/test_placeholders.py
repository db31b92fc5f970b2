"""The tokenizer's sizes and placeholders are those that the engine's towers ask for."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.engine.checkpoints.nano.glm import build_nano, nano_config
from services.engine.layers.vision.deepseek import DeepseekVision
from services.engine.layers.vision.parts import Grid
from services.engine.models.base import VisionModel
from services.engine.models.registry import load_model
from services.engine.models.vision_config import deepseek_v41_vision
from services.tokenizer.images.deepseek import DeepSeekV4Layout, DeepSeekV4Sizing, Role
from services.tokenizer.images.rules import rules_of
from tests.models.tiny import composite_config, save_tiny
from tests.models.vision.towers import reader_of

GOLDENS = Path(__file__).parents[2] / "goldens" / "deepseek_v41"
IMAGE = 500
# What rules_of asks of a vocabulary: the token behind image_token_id.
VOCABULARY: Any = SimpleNamespace(added={IMAGE: SimpleNamespace(text="<image>", is_control=True)})


def sizes() -> list[tuple[int, int]]:
    """Sides of pictures in pixels: all kinds of aspects, from tiny to large."""
    rng = random.Random(4)
    return [(rng.randint(1, 9), rng.randint(1, 40)), (1, 1), (3000, 40), (33, 4096)] + [
        (int(2 ** rng.uniform(5, 11)), int(2 ** rng.uniform(5, 11))) for _ in range(60)
    ]


@pytest.fixture(scope="module")
def v41() -> DeepseekVision:
    checkpoint, reader = reader_of(GOLDENS)
    config = deepseek_v41_vision(checkpoint.config, 128)
    assert config is not None
    return DeepseekVision.load(reader, config, torch.float32)


def compare(config: dict[str, Any], tower: VisionModel) -> None:
    rules = rules_of(config, {}, VOCABULARY)
    assert rules is not None
    for height, width in sizes():
        frame = rules.sizing.frame(height, width)
        for offset in (0, 5):
            placed = rules.layout.tokens(frame.height, frame.width, offset)
            assert len(placed) == tower.span_tokens(frame.height, frame.width, offset)


def test_qwen(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_5", "fp32")
    model = load_model(tmp_path, device=torch.device("cpu"), compute_dtype=torch.float32)
    assert model.vision is not None
    compare(composite_config("qwen3_5", {}, "fp32"), model.vision)


def test_glm(tmp_path: Path) -> None:
    model = load_model(
        build_nano(tmp_path / "glm", "bf16"),
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
    )
    assert model.vision is not None
    compare(nano_config("bf16"), model.vision)


def test_deepseek_v41(v41: DeepseekVision) -> None:
    checkpoint, _ = reader_of(GOLDENS)
    compare(checkpoint.config, v41)


def test_vision_exp_role_by_role(v41: DeepseekVision) -> None:
    """The id of every place says what the engine puts there."""
    sizing = DeepSeekV4Sizing(14, 3, max_tokens=384, min_pixels=147456, max_aspect=8)
    layout = DeepSeekV4Layout(sizing, first_id=1000)
    marks = {Role.START: 1.0, Role.NEWLINE: 2.0, Role.END: 3.0, Role.PAD: 4.0, Role.IMAGE: 9.0}
    learned = [marks[r] for r in (Role.START, Role.NEWLINE, Role.END, Role.PAD)]
    tower = replace(
        v41,
        config=replace(v41.config, tiled=True, max_tokens=384),
        marks=tuple(torch.full((128,), value) for value in learned),
    )
    for offset, (height, width) in enumerate(sizes()):
        frame = sizing.frame(height, width)
        grid = Grid.of(frame.height, frame.width, 14)
        count = -(-grid.rows // 3) * -(-grid.columns // 3)
        span = tower.frame(torch.full((count, 128), marks[Role.IMAGE]), grid, offset)
        placed = layout.tokens(frame.height, frame.width, offset)
        assert [marks[Role(i - 1000)] for i in placed] == span[:, 0].tolist()
        assert len(placed) == tower.span_tokens(frame.height, frame.width, offset)
