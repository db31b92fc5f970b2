"""Ahead-of-time compilation: what fits a card, and that what does not is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.kernels.aot_probe"]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def test_a_small_tile_fits(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["fits"]
    assert report["problem"] == ""
    assert 0 < report["registers"] <= 255
    assert report["shared_bytes"] > 0 and report["loop_instructions"] > 0


def test_too_much_shared_memory_is_a_problem(reports: dict[str, dict[str, Any]]) -> None:
    assert "shared memory" in reports["shared"]["problem"]


def test_spills_in_the_hot_loop_are_a_problem(reports: dict[str, dict[str, Any]]) -> None:
    assert "spill instructions" in reports["spills"]["problem"]
    assert reports["spills"]["loop_spills"] > 0
