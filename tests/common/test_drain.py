"""A service process under SIGTERM, SIGKILL and its health probe."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from warhorse.v1 import engine_pb2, engine_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

from services.common import probe
from services.common.errors import ServiceError, from_rpc_error
from services.common.grpc_client import connect, socket_path, socket_target
from tests.common.children import Child, Spawn, line_from
from tests.common.echo_service import SERVICE

ParseCall = Any  # a bidirectional call; the library's class takes type parameters in stubs only


def start(spawn: Spawn, run_dir: Path, grace_seconds: float) -> Child:
    child = spawn("tests.common.echo_service", run_dir, grace_seconds)
    assert line_from(child) == "ready"
    return child


async def echoed(call: ParseCall) -> None:
    """One message to the service and back."""
    await call.write(tokenizer_pb2.ParseRequest())
    assert isinstance(await call.read(), tokenizer_pb2.ParseResponse)


def parse(channel: grpc.aio.Channel) -> ParseCall:
    return tokenizer_pb2_grpc.TokenizerServiceStub(channel).Parse(timeout=60)


async def refusal_of(channel: grpc.aio.Channel) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await echoed(parse(channel))
    return from_rpc_error(refused.value)


async def test_a_drain_finishes_calls_refuses_new_ones_and_exits_cleanly(
    spawn: Spawn, run_dir: Path
) -> None:
    child = start(spawn, run_dir, 30)
    async with connect(socket_target(run_dir, "tokenizer")) as channel:
        load = engine_pb2_grpc.EngineServiceStub(channel).Load(engine_pb2.LoadRequest(), timeout=60)
        await load.read()
        running = parse(channel)
        await echoed(running)
        started = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(line_from, child) == "draining"
        # Many times: a write that meets the refusal would take its status away.
        refusals = [await refusal_of(channel) for _ in range(200)]
        assert {(e.reason_name, e.retry_after) for e in refusals} == {("DRAINING", 1.0)}
        target = f"unix:{socket_path(run_dir, 'tokenizer')}"
        assert await asyncio.to_thread(probe.grpc_failure, target, SERVICE, 5) == "NOT_SERVING"
        await echoed(running)
        await running.done_writing()
        assert await running.read() is grpc.aio.EOF
    assert await asyncio.to_thread(child.wait, 10) == 0
    assert time.monotonic() - started < 10
    assert not socket_path(run_dir, "tokenizer").exists()


async def test_calls_that_outlast_the_grace_period_are_cancelled(
    spawn: Spawn, run_dir: Path
) -> None:
    child = start(spawn, run_dir, 0.2)
    async with connect(socket_target(run_dir, "tokenizer")) as channel:
        running = parse(channel)
        await echoed(running)
        child.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError):
            await running.read()
    assert await asyncio.to_thread(child.wait, 10) == 0


async def test_a_second_signal_ends_the_grace_period(spawn: Spawn, run_dir: Path) -> None:
    child = start(spawn, run_dir, 60)
    async with connect(socket_target(run_dir, "tokenizer")) as channel:
        running = parse(channel)
        await echoed(running)
        child.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(line_from, child) == "draining"
        child.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(child.wait, 10) == 0
        with pytest.raises(grpc.aio.AioRpcError):
            await running.read()


def test_a_killed_service_leaves_a_socket_that_its_successor_replaces(
    spawn: Spawn, run_dir: Path
) -> None:
    child = start(spawn, run_dir, 1)
    child.kill()
    child.wait(10)
    assert socket_path(run_dir, "tokenizer").exists()
    start(spawn, run_dir, 1)


def test_a_service_that_cannot_start_says_why_and_exits_with_2(spawn: Spawn, run_dir: Path) -> None:
    start(spawn, run_dir, 1)
    second = subprocess.run(
        [sys.executable, "-m", "tests.common.echo_service", str(run_dir), "1"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert second.returncode == 2
    assert "in use by a running process" in second.stderr
    assert "Traceback" not in second.stderr


def test_the_probe_tells_ready_from_unknown_and_dead(
    spawn: Spawn, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = start(spawn, run_dir, 1)
    path = str(socket_path(run_dir, "tokenizer"))
    assert probe.main(["--socket", path]) == 0
    assert probe.main(["--target", f"unix:{path}", "--service", SERVICE]) == 0
    assert probe.main(["--socket", path, "--service", "warhorse.v1.Nothing"]) == 1
    child.kill()
    child.wait(10)
    assert probe.main(["--socket", path, "--timeout", "1"]) == 1
    assert capsys.readouterr().err.count("unhealthy:") == 2


async def test_the_probe_reads_http_status(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        status = b"200 OK" if path == b"/health" else b"503 Unavailable"
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert await asyncio.to_thread(probe.main, ["--url", url + "/health"]) == 0
    assert await asyncio.to_thread(probe.main, ["--url", url + "/other"]) == 1
    server.close()
    await server.wait_closed()
    assert await asyncio.to_thread(probe.main, ["--url", url + "/health"]) == 1
    assert "status 503" in capsys.readouterr().err


def test_the_probe_needs_somewhere_to_look() -> None:
    with pytest.raises(SystemExit):
        probe.main([])
