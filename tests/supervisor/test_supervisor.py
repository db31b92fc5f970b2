"""The local runner: order, health, restarts, failed starts, clean stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from services.common.supervisor.compose_file import HealthCheck, ServiceSpec
from services.common.supervisor.state import StackPaths, StackState
from services.common.supervisor.supervisor import Supervisor

# Writes its pid, says it is healthy, then sleeps; ends on SIGTERM.
SERVICE = "import os,sys,time; open(sys.argv[1],'a').write(f'{os.getpid()}\\n'); time.sleep(60)"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    left = [int(line) for file in tmp_path.glob("*.pids") for line in file.read_text().split()]
    assert not [pid for pid in left if psutil.pid_exists(pid)]


def spec(
    folder: Path,
    name: str,
    *,
    command: tuple[str, ...] | None = None,
    depends_on: dict[str, str] | None = None,
    healthy: str = "True",
    start_period: float = 10.0,
) -> ServiceSpec:
    pids = folder / f"{name}.pids"
    check = f"import os,sys; sys.exit(not (os.path.exists({str(pids)!r}) and {healthy}))"
    return ServiceSpec(
        name=name,
        command=command or ("python", "-c", SERVICE, str(pids)),
        environment={},
        depends_on=depends_on or {},
        health=HealthCheck((sys.executable, "-c", check), 0.2, 5.0, 1, start_period),
        restart="unless-stopped",
        stop_grace_seconds=5.0,
        mounts={},
    )


def pids(folder: Path, name: str) -> list[int]:
    file = folder / f"{name}.pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.05)


class Stack:
    """A supervisor under test."""

    def __init__(self, folder: Path, *services: ServiceSpec) -> None:
        self.paths = StackPaths(state=folder / "state", run=folder / "run")
        me = psutil.Process()
        self.state = StackState(me.pid, me.create_time(), "http://nowhere", "model")
        self.supervisor = Supervisor({s.name: s for s in services}, self.paths, self.state)
        self.task = asyncio.create_task(self.supervisor.run())

    async def stop(self) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(self.task, 20)


async def test_a_dependent_starts_only_after_its_dependency_is_healthy(folder: Path) -> None:
    gate = folder / "gate"
    first = spec(folder, "first", healthy=f"os.path.exists({str(gate)!r})")
    second = spec(folder, "second", depends_on={"first": "service_healthy"})
    stack = Stack(folder, second, first)
    await until(lambda: bool(pids(folder, "first")))
    await asyncio.sleep(0.7)
    assert not pids(folder, "second")
    gate.touch()
    await until(lambda: stack.state.ready)
    assert pids(folder, "second")
    assert await stack.stop() == 0


async def test_a_killed_service_is_started_again_and_reported(folder: Path) -> None:
    stack = Stack(folder, spec(folder, "one"))
    await until(lambda: stack.state.ready)
    os.kill(pids(folder, "one")[0], signal.SIGKILL)
    await until(lambda: len(pids(folder, "one")) == 2)
    await until(lambda: stack.state.ready)
    report = StackState.read(stack.paths.file)
    assert report is not None
    assert report.services[0].restarts == 1
    assert report.services[0].last_exit == -signal.SIGKILL
    assert report.services[0].pid == pids(folder, "one")[1]
    assert await stack.stop() == 0


async def test_a_service_that_cannot_start_fails_the_stack_with_its_own_words(
    folder: Path,
) -> None:
    line = '{"level": "ERROR", "message": "shard 2 is missing"}'
    broken = ("python", "-c", f"import sys; sys.stderr.write('''{line}'''); sys.exit(1)")
    stack = Stack(folder, spec(folder, "one"), spec(folder, "two", command=broken))
    assert await asyncio.wait_for(stack.task, 20) == 1
    assert stack.state.failure == "two could not start: shard 2 is missing"


async def test_a_service_that_never_gets_healthy_fails_the_stack_when_its_time_is_over(
    folder: Path,
) -> None:
    stack = Stack(folder, spec(folder, "one"), spec(folder, "two", healthy="0", start_period=0.5))
    assert await asyncio.wait_for(stack.task, 20) == 1
    assert stack.state.failure == "two did not become healthy in time"


async def test_a_log_that_cannot_be_written_fails_the_stack(folder: Path) -> None:
    (folder / "state/logs/two.log").mkdir(parents=True)
    stack = Stack(folder, spec(folder, "one"), spec(folder, "two"))
    assert await asyncio.wait_for(stack.task, 20) == 1
    assert "two.log" in stack.state.failure


async def test_stopping_leaves_no_process_and_no_report(folder: Path) -> None:
    stack = Stack(folder, spec(folder, "one"), spec(folder, "two"))
    await until(lambda: stack.state.ready)
    assert StackState.read(stack.paths.file) is not None
    assert await stack.stop() == 0
    assert StackState.read(stack.paths.file) is None


async def test_only_whole_paths_are_replaced_by_their_sources(folder: Path) -> None:
    script = "import os,sys; open(sys.argv[1],'w').write('\\n'.join(map(os.environ.get,'XYZ')))"
    seen = folder / "seen"
    one = replace(
        spec(folder, "one", command=("python", "-c", script, str(seen))),
        environment={"X": "/model", "Y": "/model/a", "Z": "org/model/a"},
        mounts={"/model": "/somewhere"},
    )
    stack = Stack(folder, one)
    await asyncio.wait_for(stack.task, 20)
    assert seen.read_text().split() == ["/somewhere", "/somewhere/a", "org/model/a"]
