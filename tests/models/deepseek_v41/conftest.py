"""The golden and a nano checkpoint of DeepSeek-V4.1, loaded once per test run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.checkpoint import Checkpoint
from services.engine.checkpoints.local_table import local_tables
from services.engine.checkpoints.nano.deepseek_v41 import build_nano
from services.engine.layers.vision.parts import Grid
from services.engine.models.base import Collectives, Shard
from services.engine.models.registry import load_model
from services.engine.runtime.batch import ImageBatch, StepBatch
from services.engine.runtime.tables_api import TableSource
from tests.models.runner import Part, Runner

GOLDENS = Path(__file__).parents[2] / "goldens/deepseek_v41"
CPU = torch.device("cpu")


def load(
    folder: Path = GOLDENS,
    shard: Shard | None = None,
    collectives: Collectives | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    quantised_cache: bool = False,
) -> Any:
    return load_model(
        folder,
        device=CPU,
        compute_dtype=dtype,
        shard=shard,
        collectives=collectives,
        quantised_cache=quantised_cache,
    )


def prompt(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 480, (count,), generator=generator).tolist()


def golden(name: str) -> dict[str, torch.Tensor]:
    with np.load(GOLDENS / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def assert_rows_near(found: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    """Rows agree, but for those behind a rounding of the cache that fell on the other side.

    A value amid two steps of the grid goes either way with the order of sums, which differs
    among CPUs; the tokens that read it then differ by more than `atol`.
    """
    near = (found - expected).abs().amax(1) <= atol
    assert near.double().mean() >= 0.5, f"rows that differ: {(~near).nonzero().flatten().tolist()}"


@dataclass(frozen=True)
class Cases:
    prompts: dict[str, list[int]]
    together: list[str]
    decode: dict[str, int]
    image_start: int
    image_grid: tuple[int, int]  # patches

    @classmethod
    def read(cls) -> Cases:
        data = json.loads((GOLDENS / "cases.json").read_text())
        image = data["image"]
        return cls(
            prompts={name: case["input_ids"] for name, case in data["cases"].items()},
            together=data["batch"],
            decode=data["decode"],
            image_start=image["start"],
            image_grid=(image["n_vit_h"], image["n_vit_w"]),
        )


def image_values(model: Any, patches_P3XX: torch.Tensor, cases: Cases) -> torch.Tensor:
    """What stands for the case's image in the prompt: fp32 [S, hidden]."""
    tower, side = model.vision, patches_P3XX.shape[-1]
    grid = Grid.of(*(side * count for count in cases.image_grid), side)
    features = tower.encode(patches_P3XX, grid)
    return tower.frame(tower.align(features, grid), grid, cases.image_start)


class ImageRunner(Runner):
    """Gives every sequence the same image: `values` [n, hidden] from position `start` on."""

    def __init__(self, stages: Sequence[Any], table: TableSource, start: int, values: Any) -> None:
        super().__init__(stages, table)
        self.start, self.values = start, values

    def _batch(self, parts: Sequence[Part]) -> tuple[StepBatch, list[list[int]]]:
        batch, slots = super()._batch(parts)
        at_T = batch.positions_T - self.start
        inside_T = (at_T >= 0) & (at_T < len(self.values))
        if not inside_T.any():
            return batch, slots
        last = self.start + len(self.values) - 1
        positions_T = batch.positions_T
        images = ImageBatch(
            rows_R=inside_T.nonzero().squeeze(1),
            values_RH=self.values[at_T[inside_T]],
            span_first_T=torch.where(inside_T, self.start, positions_T),
            span_last_T=torch.where(inside_T, last, positions_T),
        )
        return replace(batch, images=images), slots


@pytest.fixture(scope="session")
def cases() -> Cases:
    return Cases.read()


@pytest.fixture(scope="session")
def tables() -> TableSource:
    return local_tables(Checkpoint.open(GOLDENS))


@pytest.fixture(scope="session")
def exact() -> Any:
    """The golden model, cache rows in fp32."""
    return load()


@pytest.fixture(scope="session")
def quantised() -> Any:
    """The golden model, cache rows rounded as in training."""
    return load(quantised_cache=True)


@pytest.fixture
def runner(exact: Any, tables: TableSource) -> Runner:
    return Runner([exact], tables)


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nano(tmp_path_factory.mktemp("v41") / "nano")
