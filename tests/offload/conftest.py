"""A checkpoint folder and run directories for the offload tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.common.checkpoint import Checkpoint
from services.common.ngram_table import TableLayout, find_tables
from tests.offload.checkpoint import make_checkpoint
from tests.service_process import RunDir, ServiceProcess

FULL_NAME = "warhorse.v1.OffloadService"


@dataclass(frozen=True)
class Model:
    """A checkpoint folder with a table, and what is in it."""

    folder: Path
    table: torch.Tensor  # uint8 [rows, row_bytes]

    def layouts(self) -> tuple[TableLayout, ...]:
        with Checkpoint.open(self.folder) as checkpoint:
            return find_tables(checkpoint)


def make_service(run_dir: RunDir, folder: Path, *flags: str) -> ServiceProcess:
    return ServiceProcess("offload", FULL_NAME, run_dir.path, ["--model", str(folder), *flags])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A table of 12,160 rows of 16 e4m3 values."""
    folder = tmp_path_factory.mktemp("model")
    return Model(folder, make_checkpoint(folder))


@pytest.fixture
def run_dir() -> Iterator[RunDir]:
    made = RunDir()
    yield made
    made.close()


@pytest.fixture
def service(run_dir: RunDir, model: Model) -> Iterator[ServiceProcess]:
    process = make_service(run_dir, model.folder)
    process.start()
    yield process
    process.kill()
