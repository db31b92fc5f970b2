"""Cost of the plumbing: `python -m tests.benchmarks.gateway [--url URL] [--json]`.

Two measurements, each over real HTTP with the real gateway and tokenizer as processes.

Latency: an engine inside this process stamps every token; added latency is the time from its
gRPC write to the arrival of the token's SSE frame here, for 1 and 64 streams of 50 tokens/s.

Throughput: the real engine front plays a script. `paced` offers a fixed number of tokens per
second, one token a message, over 64 streams; `merged` lets the front run as fast as it can, so
that it merges what is pending. Token updates are counted by the usage frame, SSE frames apart.

With --url only the throughput of a stack that is already running is measured: its engine should
be scripted without delay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop

from tests.benchmarks.stamped_engine import StampedEngine
from tests.gateway.pipeline import Pipeline, running_pipeline

TOKENS = 400
STREAMS = 64
WORD = "abcdefgh "
FRAME = re.compile(rb'"delta":{"content":"([^"]*)"')
CUT = 4096  # longer than any frame


@dataclass
class Latency:
    """Added milliseconds per token."""

    streams: int
    tokens: int
    median_ms: float
    p90_ms: float
    p99_ms: float


@dataclass
class Throughput:
    """Token updates per second from engine to SSE, and what they cost."""

    name: str
    streams: int
    tokens_per_second: float
    frames_per_second: float
    tokens_per_frame: float
    cpu_us_per_token: dict[str, float]


@dataclass
class StreamCount:
    """What one stream brought; `arrivals` has one time per character."""

    frames: int
    tokens: int
    arrivals: list[float]


async def read_stream(url: str, body: dict[str, Any]) -> StreamCount:
    """Send one streamed chat request and read it to its end."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write((head + content).encode())
    arrivals: list[float] = []
    frames, rest = 0, b""
    while piece := await reader.read(1 << 16):
        now = time.perf_counter()
        complete, mark, tail = (rest + piece).rpartition(b"\n\n")
        rest, last = (tail if mark else complete + tail), complete[-CUT:]
        for text in FRAME.findall(complete):
            frames += 1
            arrivals += [now] * len(text)
    writer.close()
    if b"data: [DONE]" not in last:
        raise RuntimeError(f"a stream broke: {last[-300:]!r}")
    tokens = int(last.split(b'"completion_tokens":')[-1].split(b",")[0])
    return StreamCount(frames, tokens, arrivals)


def request(tokens: int) -> dict[str, Any]:
    """A request whose answer is content alone."""
    return {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": tokens,
        "chat_template_kwargs": {"enable_thinking": False},
    }


async def measure_latency(url: str, engine: StampedEngine, streams: int, tokens: int) -> Latency:
    """Added latency with `streams` at a time."""
    engine.stamps.clear()
    bodies = [request(tokens) | {"request_id": f"bench{i}"} for i in range(streams)]
    counts = await asyncio.gather(*(read_stream(url, body) for body in bodies))
    added = sorted(
        (arrival - stamp) * 1e3
        for i, count in enumerate(counts)
        for arrival, stamp in zip(count.arrivals, engine.stamps[f"bench{i}"], strict=True)
    )
    return Latency(
        streams,
        len(added),
        round(statistics.median(added), 3),
        round(added[int(0.9 * len(added))], 3),
        round(added[int(0.99 * len(added))], 3),
    )


class CpuMeter:
    """CPU seconds of the pipeline's processes."""

    def __init__(self, pipeline: Pipeline | None) -> None:
        self._processes: dict[str, psutil.Process] = {}
        if pipeline is not None and pipeline.engine is not None:
            pids = {
                "engine": pipeline.engine.pid,
                "tokenizer": pipeline.tokenizer.pid,
                "gateway": pipeline.gateway.process.pid,
            }
            self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._processes["client"] = psutil.Process()
        self._began = self._seconds()

    def _seconds(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: t.user + t.system for name, t in times.items()}

    def per_token(self, tokens: int) -> dict[str, float]:
        """Microseconds per token since the meter was made."""
        now = self._seconds()
        return {name: round((now[name] - self._began[name]) / tokens * 1e6, 1) for name in now}


async def measure_throughput(
    url: str, name: str, body: dict[str, Any], streams: int, pipeline: Pipeline | None
) -> Throughput:
    """Tokens per second while `streams` run at a time."""
    meter = CpuMeter(pipeline)
    began = time.perf_counter()
    counts = await asyncio.gather(*(read_stream(url, body) for _ in range(streams)))
    seconds = time.perf_counter() - began
    tokens, frames = sum(c.tokens for c in counts), sum(c.frames for c in counts)
    return Throughput(
        name,
        streams,
        round(tokens / seconds),
        round(frames / seconds),
        round(tokens / frames, 2),
        meter.per_token(tokens),
    )


def paced_request(rate: int) -> dict[str, Any]:
    """A request that the script answers at `rate` tokens per second over all streams."""
    body = request(rate * 6 // STREAMS)
    body["messages"][0]["content"] = f"paced {rate}"
    return body


def script(rates: Sequence[int]) -> list[dict[str, Any]]:
    """A line per pace, and one without any delay."""
    paced = [
        {
            "when": {"prompt_contains": f"paced {rate}"},
            "text": WORD * (rate * 6 // STREAMS),
            "delay_ms": STREAMS * 1e3 / rate,
        }
        for rate in rates
    ]
    return [*paced, {"when": {}, "text": WORD * 2000}]


async def latency_report(tokens: int) -> list[Latency]:
    """Latency at 1 and 64 streams with a stamped engine."""
    with running_pipeline(None) as pipeline:
        async with StampedEngine(pipeline.run_dir) as engine:
            await asyncio.to_thread(pipeline.gateway.wait_until_healthy)
            await measure_latency(pipeline.url, engine, 4, 20)
            return [await measure_latency(pipeline.url, engine, n, tokens) for n in (1, STREAMS)]


async def throughput_report(rates: Sequence[int]) -> list[Throughput]:
    """Throughput of a stack of its own."""
    results = []
    with running_pipeline(script(rates)) as pipeline:
        await measure_throughput(pipeline.url, "warm-up", request(50), 4, pipeline)
        for rate in rates:
            name = f"paced at {rate}/s"
            body = paced_request(rate)
            results.append(await measure_throughput(pipeline.url, name, body, STREAMS, pipeline))
        body = request(3000)
        results.append(await measure_throughput(pipeline.url, "merged", body, STREAMS, pipeline))
    return results


async def run(options: argparse.Namespace) -> list[Latency | Throughput]:
    """All measurements that `options` ask for."""
    if options.url:
        body = request(options.tokens)
        return [await measure_throughput(options.url, "given stack", body, STREAMS, None)]
    return [*await latency_report(options.tokens), *await throughput_report(options.rates)]


def main() -> int:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="", help="base URL of a running stack")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of a stream")
    parser.add_argument("--rates", type=int, nargs="*", default=[3000, 5000, 6000])
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    options = parser.parse_args()
    for result in uvloop.run(run(options)):
        line = asdict(result)
        sys.stdout.write(json.dumps(line) if options.json else f"{type(result).__name__}: {line}")
        sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
