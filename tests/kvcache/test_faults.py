"""Clients and the service itself killed at random moments."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from services.common.errors import ErrorReason, from_rpc_error
from services.common.memory import live_memfds
from tests.kvcache.client import keys_of, session, stats, unit_chain
from tests.kvcache.conftest import make_service, wait_idle
from tests.kvcache.victim import CHAIN
from tests.service_process import ROOT, RunDir, ServiceProcess, child_environment

KILLS = 24
AT_ONCE = 4


def start_victim(
    service: ServiceProcess, role: str, salt: str, count: int = 0
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.kvcache.victim", role]
    command += [service.address, str(service.run_dir), salt, str(count)]
    return subprocess.Popen(
        command, env=child_environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


async def wait_for(victim: subprocess.Popen[str], word: str) -> None:
    assert victim.stdout is not None
    line = await asyncio.to_thread(victim.stdout.readline)  # our own sessions go on pinging
    assert line.strip() == word


def kill(victim: subprocess.Popen[str]) -> None:
    victim.kill()
    victim.wait()
    assert victim.stdout is not None
    victim.stdout.close()


async def test_killed_writers_leave_no_readable_partial_object(service: ServiceProcess) -> None:
    chance = random.Random(11)
    salts = [f"victim-{i}" for i in range(KILLS)]
    whole = 0
    for start in range(0, KILLS, AT_ONCE):
        victims = [start_victim(service, "write", s) for s in salts[start : start + AT_ONCE]]
        for victim in victims:
            await wait_for(victim, "begun")
        for victim in victims:
            time.sleep(chance.uniform(0.0, 0.03))
            kill(victim)
        async with session(service.address, service.run_dir) as reader:
            for salt in salts[start : start + AT_ONCE]:
                for number in range(100):
                    whole += await reader.load(unit_chain(CHAIN, f"{salt}-{number}".encode()))
    await wait_idle(service.address)
    assert whole > 0  # some stores did finish before the end, and their bytes were compared
    assert (await stats(service.address)).corrupt_objects == 0


async def test_a_killed_writer_s_slots_are_freed_after_the_grace(service: ServiceProcess) -> None:
    victim = start_victim(service, "write", "slow")
    await wait_for(victim, "begun")
    kill(victim)
    await wait_idle(service.address)
    async with session(service.address, service.run_dir) as client:
        hashes = unit_chain(CHAIN, b"slow-0")
        await client.store(keys_of(hashes))
        assert await client.load(hashes) == CHAIN


async def test_a_killed_reader_s_thousand_leases_end_at_once(service: ServiceProcess) -> None:
    hashes = unit_chain(CHAIN, b"shared")
    async with session(service.address, service.run_dir) as client:
        await client.store(keys_of(hashes))
        before = (await stats(service.address)).used_bytes
        victim = start_victim(service, "read", "shared", 1000)
        await wait_for(victim, "held")
        assert (await stats(service.address)).read_leases == 1000
        started = time.monotonic()
        kill(victim)
        while (await stats(service.address)).read_leases:
            assert time.monotonic() - started < 5.0
            await asyncio.sleep(0.01)
        assert (await stats(service.address)).used_bytes == before
        for i in range(40):  # and may be evicted again
            await client.store(keys_of(unit_chain(10, bytes([i]))))
        assert await client.lookup(hashes) == 0


async def test_each_life_has_its_own_generation_and_leaks_nothing(own_run_dir: RunDir) -> None:
    name = f"kvcache-leaks-{os.getpid()}"
    service = make_service(own_run_dir, name)
    generations = []
    for _ in range(2):
        service.start()
        async with session(service.address, service.run_dir) as client:
            await client.store(keys_of(unit_chain(2)))
            generations.append(client.generation)
            assert len(live_memfds(f"region:{name}")) == 1
            assert "/dev/shm" not in Path(f"/proc/{service.pid}/maps").read_text()
            service.kill()
            old_session = client.session_id
        assert not live_memfds(f"region:{name}")
    assert len(set(generations)) == 2
    service.start()
    async with session(service.address, service.run_dir) as client:
        assert await client.lookup(unit_chain(2)) == 0
        client.session_id = old_session
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.lookup(unit_chain(2))
        assert from_rpc_error(error.value).reason == ErrorReason.ERROR_REASON_STALE_GENERATION
    assert service.stop() == 0
    assert not live_memfds(f"region:{name}")
    assert not [p for p in Path(service.run_dir).rglob("*") if p.is_socket()]


async def test_sessions_leave_no_descriptor_behind(service: ServiceProcess) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{service.pid}/fd"))

    async def visit() -> None:
        async with session(service.address, service.run_dir) as client:
            await client.store(keys_of(unit_chain(1)))
            await client.begin_load(unit_chain(1))

    await visit()
    await wait_idle(service.address)
    before = descriptors()
    for _ in range(20):
        await visit()
    await wait_idle(service.address)
    assert descriptors() <= before + 1
