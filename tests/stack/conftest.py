"""Real stacks: five local processes started by the command that users run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from warhorse.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    kvcache_pb2,
    kvcache_pb2_grpc,
    offload_pb2,
    offload_pb2_grpc,
)

from services.common.cli.up import DEFAULT_MODEL
from services.common.grpc_client import connect, socket_target
from services.common.supervisor.state import ROOT, StackPaths

SERVICES = ("gateway", "tokenizer", "engine", "kvcache", "offload")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Stack:
    """A running stack. Commands run as a user would run them."""

    home: Path
    port: int = field(default_factory=free_port)
    model: Path = DEFAULT_MODEL

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "WARHORSE_HOME": str(self.home)}

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(ROOT / "warhorse"), *arguments], env=self.environment, cwd=ROOT,
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip

    def up(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        model = () if "--model" in arguments else ("--model", str(self.model))
        return self.command("up", "--detach", "--port", str(self.port), *model, *arguments)

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.command("down")

    def status(self) -> dict[str, dict[str, Any]]:
        rows = json.loads(self.command("status", "--json").stdout)
        return {row["service"]: row for row in rows}

    def report(self) -> dict[str, dict[str, Any]]:
        """The supervisor's own file: cheap enough to poll."""
        raw = json.loads(self.paths.file.read_text())
        return {row["service"]: row for row in raw["services"]}

    def kill(self, service: str) -> None:
        os.kill(self.report()[service]["pid"], signal.SIGKILL)

    def wait_restarted(self, service: str, restarts: int) -> None:
        def again() -> bool:
            row = self.report()[service]
            return row["restarts"] >= restarts and row["healthy"]

        wait_until(again, 30, f"{service} is started again")

    @property
    def paths(self) -> StackPaths:
        project = self.home / "warhorse"
        os.environ["WARHORSE_HOME"] = str(self.home)
        try:
            paths = StackPaths.of("warhorse")
        finally:
            del os.environ["WARHORSE_HOME"]
        assert paths.state == project
        return paths

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def counters(self) -> dict[str, int]:
        return asyncio.run(_counters(self.paths.run))

    def logs(self) -> str:
        return "\n".join(
            f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}"
            for file in sorted(self.paths.logs.glob("*.log"))
        )


# Counters that are 0 at rest.
BUSY = ("running", "waiting", "used", "read leases", "write leases")


async def _counters(run_dir: Path) -> dict[str, int]:
    """What must be back at its idle value: pages, leases, regions."""
    found: dict[str, int] = {}
    async with connect(socket_target(run_dir, "engine")) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        info = await stub.DescribeEngine(engine_pb2.DescribeEngineRequest(), timeout=5)
        load = await anext(aiter(stub.Load(engine_pb2.LoadRequest(), timeout=5)))
        found |= {"running": load.running, "waiting": load.waiting}
        found["regions"] = info.open_regions
        for group in info.cache_groups:
            used = group.total_pages - group.free_pages - group.cached_pages
            found[f"used {group.name}"] = used
    async with connect(socket_target(run_dir, "kvcache")) as channel:
        stats_stub = kvcache_pb2_grpc.KvCacheServiceStub(channel)
        stats = await stats_stub.Stats(kvcache_pb2.StatsRequest(), timeout=5)
        found |= {"read leases": stats.read_leases, "write leases": stats.write_leases}
        found |= {"sessions": stats.sessions, "kvcache regions": stats.open_regions}
    async with connect(socket_target(run_dir, "offload")) as channel:
        offload_stub = offload_pb2_grpc.OffloadServiceStub(channel)
        tables = await offload_stub.DescribeOffload(offload_pb2.DescribeOffloadRequest(), timeout=5)
        found["offload regions"] = tables.open_regions
    return found


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


@contextmanager
def running(stack: Stack, *arguments: str) -> Iterator[Stack]:
    """The stack, up and ready; stopped at the end, with its logs shown when a start fails."""
    started = stack.up(*arguments)
    assert started.returncode == 0, started.stderr + stack.logs()
    try:
        yield stack
    finally:
        stopped = stack.down()
    assert stopped.returncode == 0, stopped.stderr
    assert not stack.paths.run.exists()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One stack on the default model for all tests that leave it as they found it."""
    with running(Stack(tmp_path_factory.mktemp("stack"))) as found:
        # An engine serves before it has found the store; counters are compared from here on.
        wait_until(lambda: found.counters()["sessions"] == 1, 15, "the store is connected")
        yield found


@pytest.fixture
def idle(stack: Stack) -> Iterator[None]:
    """After the test every counter is back at the value it had before."""
    before: dict[str, int] = {}

    def settled() -> bool:
        """Whether an earlier request has let go of all that it held."""
        before.update(stack.counters())
        return not any(n for name, n in before.items() if name.startswith(BUSY))

    wait_until(settled, 20, f"at rest: {before}")
    yield
    wait_until(lambda: stack.counters() == before, 20, f"{stack.counters()} == {before}")
