"""Tiny checkpoints, saved once per test run, and their runners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.common.checkpoint import Checkpoint
from services.engine.checkpoints.local_table import local_tables
from services.engine.layers.context import StepContext
from services.engine.models.base import Collectives, Shard
from services.engine.models.registry import load_model
from services.engine.models.stage import Stage
from services.engine.runtime.tables_api import TableSource
from tests.models.runner import Runner
from tests.models.tiny import Family, Layout, TinyCheckpoint, save_tiny

GetTiny = Callable[[Family, Layout], TinyCheckpoint]
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def get_tiny(tmp_path_factory: pytest.TempPathFactory) -> GetTiny:
    saved: dict[tuple[Family, Layout], TinyCheckpoint] = {}

    def get(family: Family, layout: Layout) -> TinyCheckpoint:
        if (family, layout) not in saved:
            folder = tmp_path_factory.mktemp(f"{family}-{layout}")
            saved[family, layout] = save_tiny(folder, family, layout)
        return saved[family, layout]

    return get


def load(
    folder: Path,
    shard: Shard | None = None,
    collectives: Collectives | None = None,
    dtype: torch.dtype = torch.float32,
) -> Stage[StepContext]:
    return load_model(folder, device=CPU, compute_dtype=dtype, shard=shard, collectives=collectives)


def tables_of(folder: Path) -> TableSource:
    return local_tables(Checkpoint.open(folder))


def runner_of(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Runner:
    return Runner([load(folder, dtype=dtype)], tables_of(folder), seed)
