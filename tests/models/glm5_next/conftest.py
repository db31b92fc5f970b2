"""Nano checkpoints of GLM-5.3-Flash, made and loaded once per test run, and their oracles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.checkpoints.nano.glm import Layout, build_nano
from services.engine.layers.context import PassContext
from services.engine.models.base import Collectives, Shard
from services.engine.models.registry import load_model
from services.engine.models.stage import Stage
from tests.models.runner import Runner

CPU = torch.device("cpu")
Model = Stage[PassContext]
GetNano = Callable[[Layout], Path]


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
    made: dict[Layout, Path] = {}

    def get(layout: Layout) -> Path:
        if layout not in made:
            made[layout] = build_nano(tmp_path_factory.mktemp("glm") / layout, layout)
        return made[layout]

    return get


@pytest.fixture(scope="session")
def nano(get_nano: GetNano) -> Model:
    return load(get_nano("fp8"))


@pytest.fixture
def runner(nano: Model) -> Runner:
    return Runner([nano])
