"""Compiled kernels of an image: found where they are shipped, others written elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.aot.shipped import VARIABLE, ShippedCache
from services.common.supervisor.state import ROOT


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """What is shipped, with one entry, and the folder that can be written."""
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shipped))
    monkeypatch.delenv(VARIABLE, raising=False)
    cache = ShippedCache("known")
    cache.put_group("kernel", {"kernel.cubin": cache.put(b"code", "kernel.cubin")})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(own))
    monkeypatch.setenv(VARIABLE, str(shipped))
    return shipped, own


def test_shipped_entries_are_read_and_others_are_written_elsewhere(
    folders: tuple[Path, Path],
) -> None:
    shipped, own = folders
    group = ShippedCache("known").get_group("kernel")
    assert group == {"kernel.cubin": str(shipped / "known" / "kernel.cubin")}
    other = ShippedCache("other")
    assert other.get_group("kernel") is None
    assert other.put(b"new", "kernel.cubin") == str(own / "other" / "kernel.cubin")
    assert not (shipped / "other").exists()


def test_an_entry_that_is_shipped_is_never_written(folders: tuple[Path, Path]) -> None:
    with pytest.raises(RuntimeError, match=r"lacks kernel\.json"):
        ShippedCache("known").put(b"", "kernel.json")


def test_a_server_finds_the_code_that_an_image_ships(tmp_path: Path) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    build = [sys.executable, "-m", "kernels.aot", "--targets", "86", "--only", "embedding:"]
    subprocess.run([*build, "--cache", str(shipped)], cwd=ROOT, env=environment, check=True)
    before = {path: path.stat().st_mtime_ns for path in shipped.rglob("*")}
    environment |= {
        "TRITON_CACHE_MANAGER": "kernels.aot.shipped:ShippedCache", VARIABLE: str(shipped),
        "TRITON_CACHE_DIR": str(own), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    probe = [sys.executable, "-m", "tests.kernels.aot_cache_probe"]
    done = subprocess.run(probe, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    # Three served shapes share one kernel; the odd width is compiled, into the other folder.
    assert json.loads(done.stdout)["hits"] == [True, False]
    assert {path: path.stat().st_mtime_ns for path in shipped.rglob("*")} == before
    assert len(list(own.rglob("*.cubin"))) == 1
