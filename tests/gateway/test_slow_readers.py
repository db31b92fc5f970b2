"""Clients that take nothing, or next to nothing: they are cut, cost little, and delay nobody."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest

from tests.gateway.interfaces import CHAT, INTERFACES, read_stream
from tests.gateway.pipeline import Pipeline, running_pipeline
from tests.service_process import eventually
from tests.tokenizer.support import reference

MANY = 100_000  # tokens of a stream that nobody reads
FEW = 300
SCRIPT: list[dict[str, Any]] = [
    {"when": {"prompt_contains": "short"}, "token_ids": [*reference().encode("a").ids] * FEW},
    {"when": {}, "token_ids": [*reference().encode("a").ids] * MANY},
]
STALL_SECONDS = 0.5
MAX_GROWTH = 16 << 20  # bytes of all processes together; what is sent would be several times that
REQUESTS: dict[str, dict[str, Any]] = {
    **{i.path: i.body("all", MANY) | {"stream": True} for i in INTERFACES.values()},
    "/v1/completions": {"prompt": "all", "max_tokens": MANY, "stream": True},
}


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    flags = ("--stall-seconds", str(STALL_SECONDS))
    with running_pipeline(SCRIPT, flags, max_model_len=2 * MANY) as running:
        yield running


class SlowClient:
    """A request over a connection whose receive buffer is tiny."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(("127.0.0.1", port))
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        self.received = b""

    def take(self, count: int) -> bool:
        """Read up to `count` bytes; False at the end of the connection."""
        try:
            data = self.socket.recv(count)
        except ConnectionResetError:
            return False
        self.received += data
        return bool(data)

    def close(self) -> None:
        self.socket.close()


def processes(pipeline: Pipeline) -> list[psutil.Process]:
    pids = [pipeline.gateway.process.pid, pipeline.tokenizer.pid, pipeline.engines[0].pid]
    return [psutil.Process(pid) for pid in pids]


def memory(pipeline: Pipeline) -> int:
    """Resident bytes of gateway, tokenizer and engine."""
    return sum(process.memory_info().rss for process in processes(pipeline))


def running(pipeline: Pipeline) -> int:
    loads = httpx.get(f"{pipeline.url}/v1/loads").json()["loads"]
    return int(loads[0]["num_running_reqs"])


def read_short(pipeline: Pipeline) -> str:
    """The text of a stream that is read at once."""
    body = CHAT.body("short", FEW) | {"stream": True}
    stream = read_stream(CHAT, httpx.post(f"{pipeline.url}{CHAT.path}", json=body).text)
    stream.assert_complete()
    return stream.text


@pytest.mark.parametrize("takes", [0, 1])
def test_streams_that_are_hardly_read_are_cut(pipeline: Pipeline, takes: int) -> None:
    assert read_short(pipeline) == "a" * FEW
    before = memory(pipeline)
    with ExitStack() as stack:
        clients = [
            stack.enter_context(contextlib.closing(SlowClient(pipeline.gateway.port, path, body)))
            for path, body in REQUESTS.items()
        ]
        eventually(lambda: running(pipeline) == len(clients))
        ended = threading.Event()
        reading = threading.Thread(target=trickle, args=(clients, takes, ended))
        reading.start()
        highest = 0
        deadline = time.monotonic() + 10
        while running(pipeline):
            assert time.monotonic() < deadline, "a client that takes nothing keeps its stream"
            assert read_short(pipeline) == "a" * FEW
            highest = max(highest, memory(pipeline))
        ended.set()
        reading.join()
        for client in clients:
            client.socket.settimeout(5)
            while client.take(1 << 16):
                pass
            assert client.received.startswith(b"HTTP/1.1 200")
            assert not client.received.endswith(b"0\r\n\r\n"), "a cut stream does not look whole"
    assert highest - before < MAX_GROWTH


def trickle(clients: list[SlowClient], takes: int, ended: threading.Event) -> None:
    """Read `takes` bytes of each client again and again."""
    while not ended.wait(0.05):
        for client in clients if takes else ():
            client.take(takes)


def test_a_body_that_nobody_reads_is_dropped(pipeline: Pipeline) -> None:
    gateway = processes(pipeline)[0]
    files = gateway.num_fds()
    body = {"prompt": "all", "max_tokens": MANY, "return_token_ids": True}
    with contextlib.closing(SlowClient(pipeline.gateway.port, "/v1/completions", body)):
        eventually(lambda: gateway.num_fds() > files)
        eventually(lambda: gateway.num_fds() <= files, 30)
