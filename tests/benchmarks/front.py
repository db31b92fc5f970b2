"""Speed of the engine's front: messages and tokens per second, latency that it adds.

    python -m tests.benchmarks.front

Two processes: the service, and this client of it over a Unix socket. `throughput` uses the
scripted engine without delay. `latency` uses a core process that sends the time as its tokens, one
step for all requests every 10 ms: what is measured is the way from the core through ring, front
and gRPC to the client. Figures hold for the machine and its load; CPU seconds are the front's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.engine_pb2_grpc import EngineServiceStub

from services.common.grpc_client import connect, socket_target
from tests.front.clock_core import age_seconds
from tests.front.helpers import make_request, write_model_folder, write_script

STEP_MICROSECONDS = 10_000
LENGTH = 500


@dataclass
class Tally:
    """What one client saw."""

    messages: int = 0
    tokens: int = 0
    ages: list[float] = field(default_factory=list)


@contextlib.asynccontextmanager
async def service(folder: Path, *flags: str) -> AsyncIterator[tuple[Any, psutil.Process]]:
    """A service process on `folder`/run that answers Generate."""
    run_dir = folder / "run"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    line = [sys.executable, "-m", *flags, "--run-dir", str(run_dir), "--log-level", "warning"]
    process = subprocess.Popen(line, env=environment)
    try:
        async with connect(socket_target(run_dir, "engine")) as channel:
            stub = EngineServiceStub(channel)
            await stub.DescribeEngine(pb.DescribeEngineRequest(), wait_for_ready=True, timeout=30)
            yield stub, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


async def read(stub: Any, request: pb.GenerateRequest, tally: Tally, *, ages: bool) -> None:
    """One request from its start to its end."""
    async for event in stub.Generate(request, timeout=600):
        if event.HasField("chunk"):
            tally.messages += 1
            tally.tokens += len(event.chunk.token_ids)
            if ages:
                tally.ages.extend(age_seconds(token) for token in event.chunk.token_ids)


async def measure(
    stub: Any, process: psutil.Process, concurrency: int, request: pb.GenerateRequest, *, ages: bool
) -> dict[str, float]:
    """`concurrency` equal requests at once; rates per second, latency in milliseconds."""
    await read(stub, request, Tally(), ages=ages)
    tally, cpu, started = Tally(), _cpu(process), time.monotonic()
    await asyncio.gather(*(read(stub, request, tally, ages=ages) for _ in range(concurrency)))
    seconds, cpu = time.monotonic() - started, _cpu(process) - cpu
    result = {
        "concurrency": concurrency,
        "messages_per_s": tally.messages / seconds,
        "tokens_per_s": tally.tokens / seconds,
        "tokens_per_message": tally.tokens / tally.messages,
        "front_cpu_us_per_message": cpu * 1e6 / tally.messages,
    }
    if ages:
        percentiles = statistics.quantiles(tally.ages, n=100)
        result |= {"latency_p50_ms": 1e3 * percentiles[49], "latency_p99_ms": 1e3 * percentiles[98]}
    return result


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def throughput(folder: Path, length: int) -> AsyncIterator[dict[str, Any]]:
    """Scripted engine without delay: one token a message, then with merging."""
    model = write_model_folder(folder / "model")
    script = write_script(folder / "script.jsonl", {"token_ids": [7] * length, "chunk": 1})
    scripted = ("services.engine", "--engine", "scripted", "--script", str(script))
    common = (*scripted, "--model", str(model), "--served-model-name", "test-model")
    common += ("--max-model-len", str(length + 8))
    request = make_request(stopping__max_tokens=length)
    for merge in ("--no-merge-tokens", "--merge-tokens"):
        for concurrency in (1, 64):
            async with service(folder, *common, merge) as (stub, process):
                result = await measure(stub, process, concurrency, request, ages=False)
            yield {"benchmark": "throughput", "mode": merge.strip("-"), **result}


async def latency(folder: Path, length: int) -> AsyncIterator[dict[str, Any]]:
    """Clock core: a step every 10 ms, its tokens are times."""
    request = make_request(stopping__max_tokens=length, sampling__seed=STEP_MICROSECONDS)
    for concurrency in (1, 64):
        async with service(folder, "tests.benchmarks.clock_engine") as (stub, process):
            result = await measure(stub, process, concurrency, request, ages=True)
        yield {"benchmark": "latency", "step_ms": STEP_MICROSECONDS / 1e3, **result}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a request")
    length = parser.parse_args().length
    with tempfile.TemporaryDirectory(prefix="wh-") as name:
        for benchmark in (throughput, latency):
            async for result in benchmark(Path(name), length):
                rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
                print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
