"""Ahead-of-time compilation: what fits a card, and that a server finds what was compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.aot.compile import hot_loop

ROOT = Path(__file__).parents[2]


def python(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process that compiles: Triton's interpreter is chosen for a whole process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    done = python(tmp_path_factory.mktemp("triton"), "-m", "tests.kernels.aot_probe")
    assert done.returncode == 0, done.stderr
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
    assert reports["spills"]["loop_spills"] > 0 and reports["spills"]["stack_bytes"] > 0


def files(folder: Path) -> dict[str, int]:
    """Names of files below `folder`, and when each was written."""
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_launches_of_served_shapes_find_the_compiled_code(tmp_path: Path) -> None:
    command = ("-m", "kernels.aot", "--targets", "86", "--only", "embedding:", "--cache")
    done = python(tmp_path / "unused", *command, str(tmp_path / "cache"))
    assert done.returncode == 0 and "sm86: 1 variants" in done.stdout, done.stdout + done.stderr
    shipped = files(tmp_path / "cache")
    assert len([name for name in shipped if name.endswith(".cubin")]) == 1
    done = python(tmp_path / "cache", "-m", "tests.kernels.aot_cache_probe")
    assert json.loads(done.stdout) == {
        "hits": [True, False],
        "uncovered": [
            "1x1001: no variant of kernels.embedding.triton.embed for width as any number"
        ],
    }, done.stderr
    after = files(tmp_path / "cache")
    assert any("cuda_utils" in name for name in shipped) or not shutil.which("cc")
    assert {name: after[name] for name in shipped} == shipped
    assert len([name for name in after if name.endswith(".cubin")]) == 2


def test_variants_cover_the_launches_of_the_benchmark(tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "kernels.aot", "--launches", "--targets", "80")
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("inner", "start", "hot"),
    [
        ("HMMA.16816.F32.BF16 R0, R4, R8, R0", 0x20, 2),  # inner: its work and its jump
        ("FADD R0, R0, R1", 0x10, 4),  # only the outer loop has work
    ],
)
def test_the_innermost_loop_with_tensor_core_work_is_hot(inner: str, start: int, hot: int) -> None:
    lines = ["HMMA.16816.F32.BF16 R8, R4, R8, R8", inner, "@P0 BRA 0x20", "@P1 BRA 0x10"]
    sass = "\n".join(f"/*{16 * (i + 1):04x}*/ {line};" for i, line in enumerate(lines))
    found = hot_loop(sass)
    assert len(found) == hot and found[0] == lines[start // 16 - 1]
