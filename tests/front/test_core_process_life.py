"""The core as a process: death, restart, refusal, a hang. The core is the clock core."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.common_pb2 import ErrorReason

from services.common.lifecycle import EXIT_CANNOT_START, EXIT_FAILED
from services.engine import process_link
from services.engine.process_link import ProcessLink
from services.engine.server import SERVICE_NAME
from tests.front import clock_core
from tests.front.helpers import (
    Served,
    failure_of,
    make_request,
    read_all,
    serve_front,
    tokens_of,
    wait_until,
)

CLOCK = "tests.front.clock_core"


async def is_serving(served: Served) -> bool:
    stub = health_pb2_grpc.HealthStub(served.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=5)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def wait_for_serving(served: Served, expected: bool, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while await is_serving(served) is not expected:
            await asyncio.sleep(0.02)


def paced(max_tokens: int, microseconds: int = 0, first: int = 1) -> pb.GenerateRequest:
    return make_request([first], stopping__max_tokens=max_tokens, sampling__seed=microseconds)


async def test_tokens_cross_the_ring_in_order() -> None:
    async with serve_front(ProcessLink((), CLOCK)) as served:
        await wait_for_serving(served, True)
        events = await read_all(served.stub.Generate(paced(200), timeout=10))
    tokens = tokens_of(events)
    assert len(tokens) == 200
    assert all(b >= a or a - b > 1 << 31 for a, b in itertools.pairwise(tokens))


async def test_64_streams_at_once() -> None:
    async with serve_front(ProcessLink((), CLOCK)) as served:
        await wait_for_serving(served, True)
        calls = [read_all(served.stub.Generate(paced(20, 1000), timeout=20)) for _ in range(64)]
        answers = await asyncio.gather(*calls)
    assert [len(tokens_of(events)) for events in answers] == [20] * 64


async def test_long_prompt_passes_the_ring_in_pieces() -> None:
    prompt = [1] * 1_500_000  # 6 MB, the ring holds 4 MiB
    async with serve_front(ProcessLink((), CLOCK)) as served:
        await wait_for_serving(served, True)
        request = make_request(prompt, stopping__max_tokens=3, sampling__seed=0)
        events = await read_all(served.stub.Generate(request, timeout=20))
    assert len(tokens_of(events)) == 3


async def test_killed_core_fails_streams_within_a_second_and_comes_back() -> None:
    link = ProcessLink((), CLOCK)
    async with serve_front(link) as served:
        await wait_for_serving(served, True)
        calls = [served.stub.Generate(paced(100_000, 5000), timeout=30) for _ in range(4)]
        for call in calls:
            await anext(aiter(call))
        first_pid = link.core_pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        started = time.monotonic()
        errors = await asyncio.gather(*(failure_of(call) for call in calls))
        assert time.monotonic() - started < 5.0
        assert {e.reason for e in errors} == {ErrorReason.ERROR_REASON_ENGINE_LOST}
        await wait_for_serving(served, True)
        assert link.core_pid != first_pid
        events = await read_all(served.stub.Generate(paced(5), timeout=10))
        assert len(tokens_of(events)) == 5


async def test_health_and_refusal_while_the_core_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_link, "FIRST_DELAY_SECONDS", 2.0)
    async with serve_front(ProcessLink((), CLOCK)) as served:
        await wait_for_serving(served, True)
        await failure_of(served.stub.Generate(paced(1, first=clock_core.EXIT_TOKEN), timeout=10))
        await wait_for_serving(served, False, seconds=1.0)
        error = await failure_of(served.stub.Generate(paced(1), timeout=10))
        assert error.reason == ErrorReason.ERROR_REASON_LOADING
        assert error.retry_after
        await wait_for_serving(served, True)


async def test_core_that_cannot_start_is_not_started_again() -> None:
    link = ProcessLink(("--exit-code", str(EXIT_CANNOT_START)), CLOCK)
    async with serve_front(link) as served:
        async with asyncio.timeout(10):
            assert await served.front.refused == EXIT_CANNOT_START
        assert not await is_serving(served)
        assert link.core_pid is None


async def test_core_that_keeps_failing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_link, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(process_link, "MAX_FAILED_STARTS", 3)
    async with serve_front(ProcessLink(("--exit-code", "9"), CLOCK)) as served:
        async with asyncio.timeout(30):
            assert await served.front.refused == EXIT_FAILED


async def test_hung_core_turns_health_off() -> None:
    async with serve_front(ProcessLink((), CLOCK), watchdog_seconds=1.0) as served:
        await wait_for_serving(served, True)
        call = served.stub.Generate(paced(1, first=clock_core.HANG_TOKEN), timeout=20)
        await wait_for_serving(served, False, seconds=5.0)
        call.cancel()
        await wait_until(lambda: served.front.live_requests == 0)


async def test_cancel_reaches_the_core() -> None:
    async with serve_front(ProcessLink((), CLOCK)) as served:
        await wait_for_serving(served, True)
        call = served.stub.Generate(paced(100_000, 5000), timeout=30)
        await anext(aiter(call))
        call.cancel()
        async with asyncio.timeout(2):
            while (await describe(served)).max_num_seqs:
                await asyncio.sleep(0.01)


async def describe(served: Served) -> pb.DescribeEngineResponse:
    return await served.stub.DescribeEngine(pb.DescribeEngineRequest(), timeout=5)


async def test_describe_and_reset_are_answered_by_the_core() -> None:
    async with serve_front(ProcessLink((), CLOCK)) as served:
        await wait_for_serving(served, True)
        answer = await describe(served)
        assert answer.service.pid == os.getpid()
        assert answer.model.name == "test-model"
        reset = await served.stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(), timeout=5)
        assert reset.pages_dropped == 5


async def test_nothing_is_left_after_three_lives() -> None:
    before = _resources()
    link = ProcessLink((), CLOCK)
    async with serve_front(link) as served:
        for _ in range(2):
            await wait_for_serving(served, True)
            pid = link.core_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await wait_until(lambda pid=pid: link.core_pid not in (pid, None))
        await wait_for_serving(served, True)
        assert _resources() != before
        last_pid = link.core_pid
    assert _resources() == before
    assert not Path(f"/proc/{last_pid}").exists()


def _resources() -> tuple[int, int, int]:
    """Threads that send commands, open ring files and mapped ring files of this process."""
    threads = [thread.name for thread in threading.enumerate()]
    descriptors = [_target(entry) for entry in Path("/proc/self/fd").iterdir()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return (
        threads.count("core-commands"),
        sum("memfd:" in target for target in descriptors),
        sum("memfd:" in line for line in maps),
    )


def _target(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except FileNotFoundError:  # the descriptor of the listing itself
        return ""
