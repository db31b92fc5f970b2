"""Services whose supervisor was killed end before new ones take their sockets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.common.supervisor.orphans import end_orphans

POLITE = "import time; print(flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {POLITE}"


class Orphans:
    """Starts processes that look like services."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "services").mkdir()
        (folder / "services" / "__init__.py").write_text("")
        (folder / "services" / "polite.py").write_text(POLITE)
        (folder / "services" / "stubborn.py").write_text(STUBBORN)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, run_dir: Path, *command: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "WARHORSE_RUN_DIR": str(run_dir), "PYTHONPATH": ""}
        process = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            cwd=self._folder,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        self.started.append(process)
        return process


@pytest.fixture
def orphans(tmp_path: Path) -> Iterator[Orphans]:
    made = Orphans(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", ["polite", "stubborn"])
def test_services_of_an_earlier_run_are_ended(orphans: Orphans, name: str) -> None:
    run_dir = Path("/run/one")
    orphan = orphans.start(run_dir, "-m", f"services.{name}")
    assert end_orphans(run_dir, 0.5) == 1
    assert not psutil.pid_exists(orphan.pid)
    assert end_orphans(run_dir, 0.5) == 0


def test_other_processes_are_left_alone(orphans: Orphans) -> None:
    run_dir = Path("/run/one")
    others = [
        orphans.start(Path("/run/two"), "-m", "services.polite"),
        orphans.start(run_dir, "-c", POLITE),
    ]
    assert end_orphans(run_dir, 0.5) == 0
    assert [process.poll() for process in others] == [None, None]
