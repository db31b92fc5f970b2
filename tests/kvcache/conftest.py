"""One kvcache service for the module; every test must leave it idle and empty."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from warhorse.v1 import kvcache_pb2, kvcache_pb2_grpc

from services.common.grpc_client import connect
from services.common.shm import region_counts
from tests.kvcache.client import stats
from tests.service_process import RunDir, ServiceProcess

FULL_NAME = "warhorse.v1.KvCacheService"
FLAGS = ("--l1-size-gb", "0.004", "--reservation-grace-seconds", "0.5", "--silence-seconds", "3")


def make_service(run_dir: RunDir, instance: str = "kvcache-0") -> ServiceProcess:
    """A kvcache service with a 4 MiB arena and short times."""
    return ServiceProcess("kvcache", FULL_NAME, run_dir.path, FLAGS, instance)


async def wait_idle(address: str, seconds: float = 5.0) -> None:
    """Until no session and no lease is left; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        now = await stats(address)
        if not (now.sessions or now.read_leases or now.write_leases):
            return
        assert time.monotonic() < deadline, f"not idle: {now}"
        await asyncio.sleep(0.05)


async def clear(address: str) -> None:
    """Drop every object."""
    async with connect(address) as channel:
        await kvcache_pb2_grpc.KvCacheServiceStub(channel).Clear(kvcache_pb2.ClearRequest())


@pytest.fixture(scope="module")
def module_service() -> Iterator[ServiceProcess]:
    run_dir = RunDir()
    process = make_service(run_dir)
    try:
        process.start()
        yield process
        assert process.stop() == 0
    finally:
        process.kill()
        run_dir.close()


@pytest_asyncio.fixture
async def service(module_service: ServiceProcess) -> AsyncIterator[ServiceProcess]:
    """The module's service. Afterwards: idle, and not a byte in use."""
    before = region_counts()
    yield module_service
    await wait_idle(module_service.address)
    await clear(module_service.address)
    now = await stats(module_service.address)
    assert (now.used_bytes, now.objects, now.open_regions) == (0, 0, 1)
    assert region_counts() == before


@pytest.fixture
def own_run_dir() -> Iterator[RunDir]:
    run_dir = RunDir()
    yield run_dir
    run_dir.close()
