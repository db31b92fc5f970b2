"""Fixtures of the tests of services/common: short run directories, child processes, leak checks."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from services.common.shm import region_counts
from tests.common.children import Spawn

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run directory whose name is short enough for socket paths."""
    path = Path(tempfile.mkdtemp(prefix="wh-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def nothing_stays_mapped() -> Iterator[None]:
    """Every test gives back the shared mappings it made."""
    before = region_counts()
    yield
    gc.collect()
    assert region_counts() == before


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start `python -m <module> <arguments>` and end it with the test, whatever happened.

    Standard output is a pipe: children report by printing lines.
    """
    children: list[subprocess.Popen[str]] = []

    def start(module: str, *arguments: object, fds: Sequence[int] = ()) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
        child = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            pass_fds=tuple(fds),
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate(timeout=10)
