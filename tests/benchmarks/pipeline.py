"""Cost of the plumbing, from the engine's step to the client's socket.

    ./warhorse bench pipeline [--streams 64] [--seconds 6] [--rates 5000 10000]
        [--latency 1 64] [--only-latency] [--json]

Starts the five processes with `warhorse up` and a scripted engine, and reads streamed chat
completions over raw sockets. A row of the table is one measurement:

latency: a step every 50 ms gives every stream one token; added is the time from the moment at
    which the script's step is due to the arrival of the token's SSE frame here. Steps lie on
    multiples of 50 ms of the monotonic clock, which this process shares. Tokens that came before
    the last stream had its first one are apart: they waited for the requests behind them.
paced: the same at so many tokens per second over all streams. What the pipeline can carry at one
    token a frame is the highest pace with about 1.0 tokens per frame.
single: the script runs as fast as its readers take it; the engine front sends one token a chunk,
    the gateway may put several into a frame.
merged: the same, and the engine front merges what is pending.

Tokens are counted by the usage frame, SSE frames apart; the rate is that between the first and the
last data of all streams. CPU is microseconds per token of each process, the client among them,
since it runs on the same cores; others are kvcache, offload and the supervisor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil
import uvloop
from tokenizers import Tokenizer

from services.common.cli.up import DEFAULT_MODEL
from services.common.supervisor.state import StackPaths, StackState

STEP = 0.05  # seconds between the tokens of a stream, latency
WORD = "answer"  # must be one token, and no part of a frame's other fields
LENGTH = 3000  # tokens of a stream without pace
PROCESSES = ("gateway", "tokenizer", "engine")


@dataclass
class Row:
    """One measurement. Times per token in milliseconds, CPU in microseconds."""

    name: str
    streams: int
    tokens: int
    tokens_per_s: float
    tokens_per_frame: float
    added_p50_ms: float | None = None
    added_p99_ms: float | None = None
    start_p99_ms: float | None = None  # of the tokens before all streams were under way
    cpu_us: dict[str, float] = field(default_factory=dict)


class Stream(asyncio.Protocol):
    """One chat completion over a connection of its own; `done` resolves at its end."""

    def __init__(self, request: bytes, *, timed: bool) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.frames = 0
        self.began = self.ended = 0.0  # first and last data, monotonic seconds
        self.arrivals: list[float] = []  # one per token, monotonic seconds
        self._request = request
        self._timed = timed
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]  # it is a full transport

    def data_received(self, data: bytes) -> None:
        self.began = self.began or time.monotonic()
        if self._timed:
            self.arrivals += [time.monotonic()] * data.count(WORD.encode())
        self.frames += data.count(b"data: {")
        self._tail = self._tail[-2048:] + data if len(data) < 2048 else data

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = time.monotonic()
        if b"data: [DONE]" in self._tail:
            self.done.set_result(None)
        else:
            self.done.set_exception(RuntimeError(f"a stream broke: {self._tail[-300:]!r}"))

    @property
    def tokens(self) -> int:
        """Completion tokens by the usage frame."""
        return int(self._tail.rpartition(b'"completion_tokens":')[2].partition(b",")[0])

    @property
    def token_frames(self) -> int:
        """Frames without those of role, finish reason and usage."""
        return self.frames - 3

    def added(self) -> list[tuple[float, float]]:
        """Arrival of each token, and the milliseconds from its step to there.

        The first step is the last multiple of STEP before all tokens; a step that the engine
        skipped counts as latency of the tokens behind it.
        """
        if len(self.arrivals) != self.tokens:
            raise RuntimeError(f"{len(self.arrivals)} tokens arrived, usage says {self.tokens}")
        offsets = [arrival - i * STEP for i, arrival in enumerate(self.arrivals)]
        first = min(offsets) // STEP * STEP
        late = ((offset - first) * 1e3 for offset in offsets)
        return list(zip(self.arrivals, late, strict=True))


class Stack:
    """Five processes started by `warhorse up`, and what they used."""

    def __init__(self, home: Path, *, merge: bool, script: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        merging = {"WARHORSE_MERGE_TOKENS": str(merge).lower(), "WARHORSE_LOG_LEVEL": "warning"}
        self._environment = {**os.environ, "WARHORSE_HOME": str(home), **merging}
        self.run_dir = StackPaths.of("warhorse", home).run
        self._command("up", "--detach", "--port", str(self.port), "--engine", "scripted",
                      "--script", str(script))  # fmt: skip
        state = StackState.read(home / "warhorse" / "supervisor.json")
        assert state is not None
        self.processes = {s.service: psutil.Process(s.pid) for s in state.services}
        self.processes |= {"supervisor": psutil.Process(state.pid), "client": psutil.Process()}

    def _command(self, *arguments: str) -> None:
        line = [sys.executable, "-m", "services.common.cli", *arguments]
        subprocess.run(line, env=self._environment, stdout=subprocess.DEVNULL, check=True)

    def stop(self) -> None:
        """End all processes."""
        self._command("down")

    def cpu_seconds(self) -> dict[str, float]:
        """CPU of the three in the path, of the client, and of the rest together."""
        used = {name: sum(p.cpu_times()[:2]) for name, p in self.processes.items()}
        shown = {name: used.pop(name) for name in (*PROCESSES, "client")}
        return {**shown, "others": sum(used.values())}

    async def measure(self, name: str, streams: int, tokens: int, *, timed: bool = False) -> Row:
        """Run `streams` requests for `tokens` tokens each; `name` chooses the script's line."""
        cpu = self.cpu_seconds()
        readers = await asyncio.gather(
            *(self._read(name, tokens, timed=timed) for _ in range(streams))
        )
        now = self.cpu_seconds()
        seconds = max(r.ended for r in readers) - min(r.began for r in readers)
        total, frames = sum(r.tokens for r in readers), sum(r.token_frames for r in readers)
        row = Row(name, streams, total, round(total / seconds), round(total / frames, 2))
        row.cpu_us = {key: round((now[key] - cpu[key]) / total * 1e6, 1) for key in now}
        if timed:
            under_way = max(reader.began for reader in readers)
            added = [token for reader in readers for token in reader.added()]
            later = sorted(ms for at, ms in added if at > under_way)
            row.added_p50_ms, row.added_p99_ms = _quantile(later, 0.5), _quantile(later, 0.99)
            row.start_p99_ms = _quantile(sorted(ms for at, ms in added if at <= under_way), 0.99)
        return row

    async def _read(self, name: str, tokens: int, *, timed: bool) -> Stream:
        request = request_bytes(self.port, name, tokens)
        _, stream = await asyncio.get_running_loop().create_connection(
            lambda: Stream(request, timed=timed), "127.0.0.1", self.port
        )
        await stream.done
        return stream


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[int(share * len(ordered))], 2) if ordered else None


def request_bytes(port: int, name: str, tokens: int) -> bytes:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": f"[{name}]"}],
            "max_tokens": tokens,
            "chat_template_kwargs": {"enable_thinking": False},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextmanager
def running_stack(script: Sequence[dict[str, Any]], *, merge: bool) -> Iterator[Stack]:
    """A stack of its own in a temporary home."""
    with tempfile.TemporaryDirectory(prefix="wh-") as name:
        file = Path(name) / "script.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in script))
        stack = Stack(Path(name), merge=merge, script=file)
        try:
            yield stack
        finally:
            stack.stop()


def make_script(rates: Sequence[int], streams: float) -> list[dict[str, Any]]:
    """A line per measurement, chosen by its name in the prompt."""
    (token,) = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json")).encode(WORD).ids
    answer = {"token_ids": [token] * LENGTH}
    delays = {f"paced {rate}/s": streams * 1e3 / rate for rate in rates}
    paced = [_line(name, answer, delay_ms=delay, aligned=True) for name, delay in delays.items()]
    steps = _line("latency", answer, delay_ms=STEP * 1e3, aligned=True)
    return [steps, *paced, {"when": {}, **answer}]


def _line(name: str, answer: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"when": {"prompt_contains": f"[{name}]"}, **answer, **settings}


async def run(options: argparse.Namespace) -> list[Row]:
    """All measurements, printing each when it is done."""
    rows, streams = [], options.streams
    script = make_script(options.rates, streams)

    async def measure(*arguments: Any, **timed: bool) -> None:
        row = await stack.measure(*arguments, **timed)
        _show(row, as_json=options.json)
        rows.append(row)

    with running_stack(script, merge=False) as stack:
        await stack.measure("warm-up", 8, 200)
        for count in options.latency:
            await measure("latency", count, round(options.seconds / STEP), timed=True)
        if options.only_latency:
            return rows
        for rate in options.rates:
            await measure(f"paced {rate}/s", streams, round(rate * options.seconds / streams))
        await measure("single", streams, options.length)
    with running_stack(script, merge=True) as stack:
        await stack.measure("warm-up", 8, 200)
        await measure("merged", streams, LENGTH)
    return rows


def _show(row: Row, *, as_json: bool) -> None:
    values = asdict(row)
    cpu = values.pop("cpu_us")
    cells = [values[f.name] for f in fields(Row) if f.name != "cpu_us"] + list(cpu.values())
    line = json.dumps(asdict(row)) if as_json else _format(cells)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _format(cells: Sequence[Any]) -> str:
    first, *rest = ("-" if cell is None else str(cell) for cell in cells)
    return f"{first:<14}" + "".join(f"{cell:>10}" for cell in rest)


def main() -> int:
    """Print the load of the machine and one row per measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6.0, help="of latency and paced streams")
    parser.add_argument("--length", type=int, default=600, help="tokens of a stream, single")
    parser.add_argument("--rates", type=int, nargs="*", default=[5000, 10000])
    parser.add_argument(
        "--latency", type=int, nargs="*", default=[1, 64], help="streams of latency"
    )
    parser.add_argument("--only-latency", action="store_true", help="measure nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    options = parser.parse_args()
    if not options.json:
        load = "  ".join(f"{value:.1f}" for value in os.getloadavg())
        sys.stdout.write(f"{len(os.sched_getaffinity(0))} cores, load average {load}\n")
        names = ["", "streams", "tokens", "tokens/s", "tok/frame", "p50 ms", "p99 ms", "start p99"]
        names += [*PROCESSES, "client", "others"]
        sys.stdout.write(_format(names) + "   (CPU us per token)\n")
    uvloop.run(run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
