"""The engine's store client against a real service: round trips, and every way to lose it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from warhorse.v1 import kvcache_pb2

from services.common.shm import region_counts
from services.engine.cache.external import (
    JobId,
    LoadDone,
    LoadJob,
    LookupDone,
    StoreDone,
    StoreEvent,
    StoreJob,
    UnitHash,
)
from services.engine.cache.mover import PageMover
from services.engine.cache.spec import CacheGroup, CacheTensor, PageId, allocate_pools
from services.engine.cache.store_client import StoreClient, StoreClientConfig
from tests.kvcache.client import session, stats, unit_chain
from tests.kvcache.conftest import make_service, wait_idle
from tests.service_process import RunDir, ServiceProcess, eventually

UNIT = 64
UNITS = 6  # units that the pools hold
GROUPS = (
    CacheGroup(
        "kv",
        "paged",
        (CacheTensor("k", (2, 8), torch.bfloat16), CacheTensor("v", (2, 8), torch.bfloat16)),
        page_tokens=16,
    ),
    CacheGroup(
        "index", "paged", (CacheTensor("k", (5,), torch.uint8),), page_tokens=64, stride=4
    ),
    CacheGroup(
        "local", "window", (CacheTensor("k", (7,), torch.float32),), page_tokens=32,
        window_tokens=100,
    ),
    CacheGroup("state", "state", (CacheTensor("s", (3, 11), torch.float32),)),
)  # fmt: skip
FAST = StoreClientConfig(
    ping_seconds=0.3,
    silence_seconds=1.0,
    call_seconds=1.0,
    first_retry_seconds=0.05,
    last_retry_seconds=0.2,
)


def make_mover(fill: bool) -> PageMover:
    sizes = {"kv": 4 * UNITS, "index": UNITS, "local": 2 * UNITS, "state": UNITS}
    pools = allocate_pools(GROUPS, sizes, torch.device("cpu"))
    if fill:
        generator = torch.Generator().manual_seed(7)
        for tensors in pools.values():
            for tensor in tensors.values():
                data = tensor.view(torch.uint8)
                data.copy_(torch.randint(0, 256, data.shape, generator=generator))
    return PageMover(pools, GROUPS, UNIT)


def ids_of(mover: PageMover, group: str, unit: int) -> tuple[PageId, ...]:
    """The pages or the slot that unit `unit` has in these tests."""
    count = mover.unit_pages(group)
    return tuple(PageId(unit * count + i) for i in range(count))


@dataclass
class Engine:
    """A store client with pools of its own, and its answers by kind."""

    mover: PageMover
    client: StoreClient
    events: list[StoreEvent] = field(default_factory=list)
    jobs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def settle(self, done: Callable[[StoreEvent], bool], seconds: float = 5.0) -> StoreEvent:
        """Poll until an answer for which `done` holds has come; it is returned."""
        found: list[StoreEvent] = []

        def arrived() -> bool:
            self.events.extend(self.client.poll())
            found.extend(e for e in self.events if done(e))
            return bool(found)

        eventually(arrived, seconds)
        return found[0]

    def lookup(self, hashes: list[UnitHash]) -> int:
        name = f"request-{next(self.jobs)}"
        self.client.lookup(name, hashes)
        event = self.settle(lambda e: isinstance(e, LookupDone) and e.request_id == name)
        assert isinstance(event, LookupDone)
        return event.hit_units

    def begin_store(self, hashes: list[UnitHash], groups: tuple[str, ...]) -> list[JobId]:
        jobs = []
        for unit, unit_hash in enumerate(hashes):
            job = JobId(next(self.jobs))
            sources = {g: ids_of(self.mover, g, unit) for g in groups}
            self.client.store(StoreJob(job, unit_hash, sources))
            jobs.append(job)
        return jobs

    def store(
        self,
        hashes: list[UnitHash],
        groups: tuple[str, ...] = ("kv", "index", "local", "state"),
    ) -> list[bool]:
        return [self.stored(job) for job in self.begin_store(hashes, groups)]

    def stored(self, job: JobId) -> bool:
        event = self.settle(lambda e: isinstance(e, StoreDone) and e.job == job)
        assert isinstance(event, StoreDone)
        return event.stored

    def begin_load(self, hashes: list[UnitHash], first_unit: int = 0) -> JobId:
        job = JobId(next(self.jobs))
        last = len(hashes) - 1
        destinations = {
            g.name: tuple(
                ids_of(self.mover, g.name, unit)
                if g.kind == "paged"
                or unit == last
                or (g.kind == "window" and last - unit < self.mover.window_units(g.name))
                else None
                for unit in range(first_unit, len(hashes))
            )
            for g in GROUPS
        }
        self.client.load(LoadJob(job, "request", tuple(hashes), first_unit, destinations))
        return job

    def valid(self, job: JobId, seconds: float = 5.0) -> int:
        event = self.settle(lambda e: isinstance(e, LoadDone) and e.job == job, seconds)
        assert isinstance(event, LoadDone)
        return event.valid_units

    def load(self, hashes: list[UnitHash], first_unit: int = 0) -> int:
        return self.valid(self.begin_load(hashes, first_unit))


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Engines that are closed, and have unmapped everything, when the test ends."""
    before = region_counts()
    engines: list[Engine] = []

    def make(address: str, run_dir: Path, *, fill: bool = False, wait: bool = True) -> Engine:
        client = StoreClient(
            address, run_dir, client_id="engine-0", model_fingerprint="model", config=FAST
        )
        mover = make_mover(fill)
        client.bind(mover)
        engines.append(Engine(mover, client))
        if wait:
            eventually(lambda: client.connected)
        return engines[-1]

    yield make
    for engine in engines:
        engine.client.close()
    assert region_counts() == before


@pytest.fixture
def own_service(own_run_dir: RunDir) -> Iterator[ServiceProcess]:
    process = make_service(own_run_dir)
    process.start()
    yield process
    process.kill()


def hashes_of(count: int, salt: bytes = b"") -> list[UnitHash]:
    return [UnitHash(h) for h in unit_chain(count, salt)]


def assert_same_units(a: PageMover, b: PageMover, group: str, units: range) -> None:
    for unit in units:
        left, right = (bytearray(m.object_bytes(group)) for m in (a, b))
        a.write_out(group, ids_of(a, group, unit), memoryview(left))
        b.write_out(group, ids_of(b, group, unit), memoryview(right))
        assert left == right, (group, unit)


def assert_idle(service: ServiceProcess, engines: int) -> None:
    """No lease is left; one session per engine is."""

    def idle() -> bool:
        now = asyncio.run(stats(service.address))
        return (now.sessions, now.read_leases, now.write_leases) == (engines, 0, 0)

    eventually(idle)


def test_a_second_engine_loads_what_the_first_stored(
    service: ServiceProcess, make_engine: MakeEngine
) -> None:
    hashes = hashes_of(5)
    first = make_engine(service.address, service.run_dir, fill=True)
    assert first.store(hashes) == [True] * 5
    second = make_engine(service.address, service.run_dir)
    assert second.lookup(hashes) == 5
    assert second.load(hashes) == 5
    for group, units in (("kv", range(5)), ("index", range(5)), ("local", range(3, 5))):
        assert_same_units(first.mover, second.mover, group, units)
    assert_same_units(first.mover, second.mover, "state", range(4, 5))
    assert not second.mover.pools["state"]["s"][:4].any()
    assert_idle(service, engines=2)


def test_a_load_writes_no_unit_before_its_first(
    service: ServiceProcess, make_engine: MakeEngine
) -> None:
    hashes = hashes_of(4)
    first = make_engine(service.address, service.run_dir, fill=True)
    first.store(hashes)
    second = make_engine(service.address, service.run_dir)
    assert second.load(hashes, first_unit=2) == 4
    assert_same_units(first.mover, second.mover, "kv", range(2, 4))
    assert not second.mover.pools["kv"]["k"][: 4 * 2].any()


def test_storing_again_and_adding_groups_later_both_count_as_stored(
    service: ServiceProcess, make_engine: MakeEngine
) -> None:
    hashes = hashes_of(3)
    engine = make_engine(service.address, service.run_dir, fill=True)
    assert engine.store(hashes, ("kv", "index", "local")) == [True] * 3
    assert engine.lookup(hashes) == 0
    assert engine.store(hashes, ("kv", "index", "local", "state")) == [True] * 3
    assert engine.lookup(hashes) == 3


def test_a_prefix_without_its_last_state_is_not_loaded_at_all(
    service: ServiceProcess, make_engine: MakeEngine
) -> None:
    hashes = hashes_of(4)
    engine = make_engine(service.address, service.run_dir, fill=True)
    engine.store(hashes, ("kv", "index", "local"))
    engine.store(hashes[:3], ("state",))
    assert engine.lookup(hashes) == 3
    # Its state may go to no other slot than that of unit 3, so nothing before it is of use.
    assert engine.load(hashes, first_unit=1) == 1
    assert engine.load(hashes[:3], first_unit=1) == 3


def test_corrupt_bytes_are_found_by_the_reader_and_dropped(
    service: ServiceProcess, make_engine: MakeEngine
) -> None:
    hashes = hashes_of(4)
    engine = make_engine(service.address, service.run_dir, fill=True)
    engine.store(hashes)
    before = asyncio.run(stats(service.address)).corrupt_objects
    flip_one_bit(service, engine.mover, hashes, group_id=0, unit=2)
    reader = make_engine(service.address, service.run_dir)
    assert reader.load(hashes) == 0
    assert asyncio.run(stats(service.address)).corrupt_objects == before + 1
    assert reader.lookup(hashes) == 2
    assert engine.store(hashes) == [True] * 4
    assert reader.load(hashes) == 4
    assert_same_units(engine.mover, reader.mover, "kv", range(4))


def flip_one_bit(
    service: ServiceProcess,
    mover: PageMover,
    hashes: list[UnitHash],
    group_id: int,
    unit: int,
) -> None:
    """Damage an object in the arena behind everybody's back."""

    async def flip() -> None:
        async with session(service.address, service.run_dir) as client:
            # A second session of the same model, to be told where the object lies.
            stream = client.stub.Session()
            groups = [
                kvcache_pb2.StoreGroup(
                    group_id=i,
                    name=g.name,
                    kind=g.kind,
                    window_units=mover.window_units(g.name),
                    object_bytes=mover.object_bytes(g.name),
                )
                for i, g in enumerate(GROUPS)
            ]
            opened = kvcache_pb2.SessionOpen(
                client_id="vandal", model_fingerprint="model", unit_tokens=UNIT, groups=groups
            )
            await stream.write(kvcache_pb2.SessionRequest(open=opened))
            client.session_id = (await stream.read()).session_id
            begun = await client.begin_load(hashes)
            for slot in begun.slots:
                if slot.key.group_id == group_id and slot.key.unit_hash == hashes[unit]:
                    client.slot(slot)[17] ^= 4
            await client.end_load(begun.lease_id)
            stream.cancel()

    asyncio.run(flip())


def test_without_a_service_every_job_fails_at_once(
    own_run_dir: RunDir, make_engine: MakeEngine
) -> None:
    engine = make_engine(f"unix:{own_run_dir.path}/none.sock", own_run_dir.path, wait=False)
    assert not engine.client.connected
    started = time.monotonic()
    assert engine.lookup(hashes_of(3)) == 0
    assert engine.store(hashes_of(3)) == [False] * 3
    assert engine.load(hashes_of(3), first_unit=1) == 1
    assert time.monotonic() - started < 5.0


def test_a_killed_service_fails_its_jobs_and_its_next_life_is_found(
    own_service: ServiceProcess, make_engine: MakeEngine
) -> None:
    hashes = hashes_of(5)
    engine = make_engine(own_service.address, own_service.run_dir, fill=True)
    assert engine.store(hashes) == [True] * 5
    loads = [engine.begin_load(hashes) for _ in range(200)]
    stores = engine.begin_store(hashes_of(6, b"more"), ("kv", "index", "local", "state"))
    own_service.kill()
    assert {engine.valid(job) for job in loads} <= {0, 5}
    assert all(engine.stored(job) in (True, False) for job in stores)
    answered = [e.job for e in engine.events if isinstance(e, LoadDone)]
    assert sorted(answered) == sorted(loads)
    eventually(lambda: not engine.client.connected)
    own_service.start()
    eventually(lambda: engine.client.connected)
    assert engine.lookup(hashes) == 0  # a new life is empty
    assert engine.store(hashes) == [True] * 5
    assert engine.load(hashes) == 5
    assert_idle(own_service, engines=1)


def test_a_stopped_service_delays_nobody_and_is_used_again_once_it_runs(
    own_service: ServiceProcess, make_engine: MakeEngine
) -> None:
    hashes = hashes_of(3)
    engine = make_engine(own_service.address, own_service.run_dir, fill=True)
    assert engine.store(hashes) == [True] * 3
    os.kill(own_service.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        assert engine.lookup(hashes) == 0
        assert engine.load(hashes) == 0
        assert engine.store(hashes) == [False] * 3
        assert time.monotonic() - started < 3.0
    finally:
        os.kill(own_service.pid, signal.SIGCONT)
    eventually(lambda: engine.client.connected and engine.lookup(hashes) == 3, 10)
    assert_idle(own_service, engines=1)


def test_closing_answers_what_is_open_and_returns_every_lease(
    service: ServiceProcess, make_engine: MakeEngine
) -> None:
    hashes = hashes_of(5)
    engine = make_engine(service.address, service.run_dir, fill=True)
    assert engine.store(hashes) == [True] * 5
    loads = [engine.begin_load(hashes) for _ in range(50)]
    stores = engine.begin_store(hashes_of(6, b"more"), ("kv", "state"))
    engine.client.close()
    engine.events.extend(engine.client.poll())
    assert sorted(e.job for e in engine.events if isinstance(e, LoadDone)) == sorted(loads)
    answered = {e.job for e in engine.events if isinstance(e, StoreDone)}
    assert set(stores) <= answered
    asyncio.run(wait_idle(service.address))
