"""The engine service as a process of its own, for tests that kill it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.engine_pb2_grpc import EngineServiceStub

from services.common.grpc_client import connect, socket_target
from services.engine.server import SERVICE_NAME

START_SECONDS = 60.0


def start_engine(model: Path, run_dir: Path, *flags: str, log: Path) -> subprocess.Popen[bytes]:
    """`python -m services.engine`, its stderr in `log`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "GRPC_VERBOSITY": "ERROR",
    }
    line = [sys.executable, "-m", "services.engine", "--model", str(model)]
    line += ["--run-dir", str(run_dir), "--kvcache-address", "none", "--offload-address", "none"]
    line += ["--served-model-name", "test-model", *flags]
    with log.open("wb") as stderr:
        return subprocess.Popen(line, stderr=stderr, env=environment)


def log_lines(log: Path) -> list[dict[str, Any]]:
    """Every line of the log; fails on one that is not a JSON object."""
    return [json.loads(line) for line in log.read_text().splitlines()]


@dataclass
class Engine:
    """A running engine service and a client of it."""

    process: subprocess.Popen[bytes]
    channel: grpc.aio.Channel
    stub: Any
    log: Path

    def core_pid(self) -> int:
        """The process that runs the model."""
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid

    async def wait_until_serving(self, seconds: float = START_SECONDS) -> None:
        health = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(grpc.RpcError):
                    answer = await health.Check(request, timeout=5)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.05)

    async def describe(self) -> pb.DescribeEngineResponse:
        return await self.stub.DescribeEngine(pb.DescribeEngineRequest(), timeout=20)

    async def wait_until_idle(self, seconds: float = 5.0) -> None:
        """Until nothing runs or waits and every page is free (or held by the index alone)."""
        async with asyncio.timeout(seconds):
            while True:
                groups = (await self.describe()).cache_groups
                used = {g.name: g.total_pages - g.free_pages - g.cached_pages for g in groups}
                load = await anext(aiter(self.stub.Load(pb.LoadRequest())))
                if not (load.running or load.waiting or any(used.values())):
                    return
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def running_engine(model: Path, *flags: str) -> AsyncIterator[Engine]:
    """An engine that serves; at the end it is stopped by SIGTERM if it still runs."""
    run_dir = Path(tempfile.mkdtemp(prefix="wh-"))
    process = start_engine(model, run_dir, *flags, log=run_dir / "engine.log")
    try:
        async with connect(socket_target(run_dir, "engine")) as channel:
            engine = Engine(process, channel, EngineServiceStub(channel), run_dir / "engine.log")
            await engine.wait_until_serving()
            yield engine
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            process.kill()
            shutil.rmtree(run_dir)
