"""Many streaming clients that come and go: errors, leaks, memory.

    ./warhorse bench churn [--clients 500] [--seconds 150] [--json]

Starts the five processes with `warhorse up` and a scripted engine that gives every stream a token
each 200 ms. Every client asks for a streamed chat completion of random length, and half of the time
hangs up at a random moment; then it asks again, until the time is over. Lengths and moments come
from a fixed seed. A stream that is not cut must end with `[DONE]` and have the tokens that its
usage says.

Memory is the resident size of each process at the end of each quarter of the run, MiB; the first
quarter fills caches and is no part of the growth. What must be back at its idle value afterwards:
open files of each process, running and waiting requests and open regions of the engine, requests
of the gateway. What the plumbing adds to the latency of a token at so many streams is measured by
`./warhorse bench pipeline --latency N`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import uvloop
from warhorse.v1 import engine_pb2, engine_pb2_grpc

from services.common.grpc_client import connect, socket_target
from tests.benchmarks.pipeline import (
    PROCESSES,
    Stack,
    Stream,
    make_script,
    request_bytes,
    running_stack,
)  # fmt: skip

SEED = 7
DELAY = 0.2  # seconds between the tokens of a stream
LENGTHS = (5, 100)
QUARTERS = 4
NAME = "paced 1/s"  # line of the script; its delay is 1 / DELAY streams


@dataclass
class Report:
    """What a run saw. Sizes in MiB."""

    clients: int
    seconds: float
    lengths: tuple[int, int]
    completed: int = 0
    cut: int = 0
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    rss: dict[str, list[float]] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)

    @property
    def growth(self) -> dict[str, float]:
        """Memory of each process at the end over that after the first quarter."""
        return {name: round(sizes[-1] - sizes[0], 1) for name, sizes in self.rss.items()}


async def churn(
    stack: Stack, clients: int, seconds: float, lengths: tuple[int, int] = LENGTHS
) -> Report:
    """Run `clients` for `seconds` and wait until all is idle again, at most 20 s.

    `lengths`: least and most tokens of a stream.
    """
    report = Report(clients, seconds, lengths)
    await _one(stack, report, random.Random(SEED), cut=False)
    report.before = await counters(stack)
    until = time.monotonic() + seconds
    everyone = [_client(stack, report, random.Random(SEED + i), until) for i in range(clients)]
    await asyncio.gather(_watch(stack, report, seconds), *everyone)
    deadline = time.monotonic() + 20
    report.after = await counters(stack)
    while report.after != report.before and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        report.after = await counters(stack)
    return report


async def _client(stack: Stack, report: Report, draw: random.Random, until: float) -> None:
    await asyncio.sleep(draw.uniform(0, 2))
    while time.monotonic() < until:
        await _one(stack, report, draw, cut=draw.random() < 0.5)


async def _one(stack: Stack, report: Report, draw: random.Random, *, cut: bool) -> None:
    """One stream, to its end or to a random moment before it."""
    tokens = draw.randint(*report.lengths)
    request = request_bytes(stack.port, NAME, tokens)
    transport, stream = await asyncio.get_running_loop().create_connection(
        lambda: Stream(request, timed=False), "127.0.0.1", stack.port
    )
    if cut:
        await asyncio.sleep(draw.uniform(0, tokens * DELAY))
        transport.abort()
        with contextlib.suppress(RuntimeError):  # a stream that was cut is not complete
            await stream.done
        report.cut += 1
        return
    try:
        await stream.done
    except RuntimeError as error:
        report.errors.append(str(error))
        return
    report.completed += 1
    report.tokens += stream.tokens
    if stream.tokens != tokens:
        report.errors.append(f"{stream.tokens} tokens instead of {tokens}")


async def _watch(stack: Stack, report: Report, seconds: float) -> None:
    report.rss = {name: [] for name in PROCESSES}
    for _ in range(QUARTERS):
        await asyncio.sleep(seconds / QUARTERS)
        for name, sizes in report.rss.items():
            sizes.append(round(_family_rss(stack.processes[name]) / (1 << 20), 1))


def _family_rss(process: psutil.Process) -> int:
    """Of a process and its children: the core is a child of the engine's front."""
    return sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))


async def counters(stack: Stack) -> dict[str, int]:
    """What is at rest when nothing runs."""
    found = {f"files of {name}": stack.processes[name].num_fds() for name in PROCESSES}
    async with connect(socket_target(stack.run_dir, "engine")) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        info = await stub.DescribeEngine(engine_pb2.DescribeEngineRequest(), timeout=5)
        load = await anext(aiter(stub.Load(engine_pb2.LoadRequest(), timeout=5)))
    found |= {"running": load.running, "waiting": load.waiting, "regions": info.open_regions}
    found["files of engine"] = stack.processes["engine"].num_fds()  # without this call's own
    found["load"] = await asyncio.to_thread(_gateway_load, stack.port)
    return found


def _gateway_load(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/load", timeout=10) as answer:
        return int(json.load(answer)["server_load"])


def script() -> Sequence[dict[str, Any]]:
    """One line of words, a token each `DELAY` seconds."""
    return make_script([1], DELAY)


def main() -> int:
    """Print the report; status 1 when there were errors or something was left over."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    options = parser.parse_args()
    with running_stack(script(), merge=True) as stack:
        report = uvloop.run(churn(stack, options.clients, options.seconds))
    values = asdict(report) | {"growth": report.growth}
    if options.json:
        sys.stdout.write(json.dumps(values) + "\n")
    else:
        sys.stdout.write("".join(f"{name:<10}{value}\n" for name, value in values.items()))
    return 1 if report.errors or report.after != report.before else 0


if __name__ == "__main__":
    sys.exit(main())
