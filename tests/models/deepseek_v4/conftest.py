"""Nano and golden checkpoints of DeepSeek-V4, made and loaded once per test run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.checkpoints.nano.deepseek_v4 import Variant, build_nano
from services.engine.layers.deepseek.context import DeepseekContext
from services.engine.models.base import Collectives, Shard
from services.engine.models.registry import load_model
from services.engine.models.stage import Stage
from tests.models.runner import Runner

GOLDENS = Path(__file__).parents[2] / "goldens/deepseek_v4"
CPU = torch.device("cpu")
Model = Stage[DeepseekContext]
GetNano = Callable[[Variant], Path]


def load(
    folder: Path,
    shard: Shard | None = None,
    collectives: Collectives | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    return load_model(folder, device=CPU, compute_dtype=dtype, shard=shard, collectives=collectives)


def prompt(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 480, (count,), generator=generator).tolist()


@pytest.fixture(scope="session")
def get_nano(tmp_path_factory: pytest.TempPathFactory) -> GetNano:
    made: dict[Variant, Path] = {}

    def get(variant: Variant) -> Path:
        if variant not in made:
            made[variant] = build_nano(tmp_path_factory.mktemp("v4") / variant, variant)
        return made[variant]

    return get


@pytest.fixture(scope="session")
def nano(get_nano: GetNano) -> Model:
    return load(get_nano("0731"))


@pytest.fixture
def runner(nano: Model) -> Runner:
    return Runner([nano])
