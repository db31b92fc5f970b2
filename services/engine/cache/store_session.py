"""One session of the engine with the kvcache service: calls, and bytes between pools and arena."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import xxhash
from warhorse.v1 import common_pb2, kvcache_pb2, kvcache_pb2_grpc

from services.common.errors import from_rpc_error
from services.common.grpc_client import request_metadata
from services.common.prefix_chain import UnitHash
from services.common.prefix_hits import Group, longest_hit
from services.common.shm import MappedRegion
from services.engine.cache.external import LoadJob, StoreJob
from services.engine.cache.mover import PageMover
from services.engine.cache.spec import PageId, SlotId

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ids = tuple[PageId | SlotId, ...]

# Refusals that say nothing against the session itself.
_HARMLESS = (
    common_pb2.ERROR_REASON_POOL_EXHAUSTED,
    common_pb2.ERROR_REASON_INVALID_FIELD,
    common_pb2.ERROR_REASON_QUEUE_FULL,
)


class SessionLost(Exception):  # noqa: N818  (an event more than an error)
    """The session is over; its leases are the service's business now."""


@dataclass(frozen=True, slots=True)
class _Placement:
    """One object of a load: where it lies and where it goes."""

    group: Group
    unit: int
    slot: kvcache_pb2.ObjectSlot
    ids: Ids


class StoreSession:
    """Serves jobs of one session. Everything runs on the store client's event loop.

    Bytes are copied on that loop's thread between two awaits, so a cancelled job touches no page
    once its task has ended. Any failure that may leave a lease behind raises SessionLost: ending
    the stream is how the service takes leases back.
    """

    def __init__(
        self,
        stub: kvcache_pb2_grpc.KvCacheServiceStub,
        opened: kvcache_pb2.SessionResponse,
        arena: MappedRegion,
        mover: PageMover,
        call_seconds: float,
        load_seconds: float,
    ) -> None:
        self._stub = stub
        self._session_id = opened.session_id
        self._arena = arena
        self._mover = mover
        self._call_seconds = call_seconds
        self._load_seconds = load_seconds
        self._groups = store_groups(mover)
        self._by_id = {g.group_id: g for g in self._groups}
        self._by_name = {g.name: g for g in self._groups}

    async def lookup(self, unit_hashes: Sequence[UnitHash]) -> int:
        """Units of the longest restorable prefix."""
        request = kvcache_pb2.LookupRequest(
            session_id=self._session_id, unit_hashes=list(unit_hashes)
        )
        answer = await self._call(self._stub.Lookup, request)
        return min(int(answer.hit_units), len(unit_hashes))

    async def load(self, job: LoadJob) -> int:
        """Fill the destinations; returns the valid units of the whole prefix.

        Every object's digest is checked on a private copy before it reaches a page. What fails,
        or does not arrive in time, shortens the prefix.
        """
        request = kvcache_pb2.BeginLoadRequest(
            session_id=self._session_id,
            unit_hashes=list(job.unit_hashes),
            first_unit=job.first_unit,
        )
        answer = await self._call(self._stub.BeginLoad, request)
        if not answer.lease_id:
            return job.first_unit
        wanted = self._placements(job, answer.slots)
        loaded: set[tuple[int, int]] = set()
        corrupt: list[kvcache_pb2.ObjectKey] = []
        reach = self._valid(job, {(p.group.group_id, p.unit) for p in wanted})
        if reach > job.first_unit:
            needed = [p for p in wanted if p.unit in p.group.needed(reach)]
            corrupt = await self._copy_in(needed, loaded)
        end = kvcache_pb2.EndLoadRequest(
            session_id=self._session_id, lease_id=answer.lease_id, corrupt=corrupt
        )
        await self._call(self._stub.EndLoad, end)
        return self._valid(job, loaded)

    async def store(self, jobs: Sequence[StoreJob]) -> list[bool]:
        """Store the objects of several jobs; per job, whether all of them are in the store."""
        sources = {
            (self._by_name[name].group_id, bytes(job.unit_hash)): ids
            for job in jobs
            for name, ids in job.sources.items()
        }
        request = kvcache_pb2.BeginStoreRequest(
            session_id=self._session_id,
            keys=[kvcache_pb2.ObjectKey(group_id=g, unit_hash=h) for g, h in sources],
        )
        answer = await self._call(self._stub.BeginStore, request)
        missing = {(k.group_id, k.unit_hash) for k in answer.unplaced}
        if answer.lease_id and not await self._write(answer, sources):
            missing.update((s.key.group_id, s.key.unit_hash) for s in answer.slots)
        return [
            all(
                (self._by_name[n].group_id, bytes(job.unit_hash)) not in missing
                for n in job.sources
            )
            for job in jobs
        ]

    async def _write(
        self, answer: kvcache_pb2.BeginStoreResponse, sources: dict[tuple[int, bytes], Ids]
    ) -> bool:
        """Fill the slots and commit them; False if the service did not take every one."""
        digests = []
        for slot in answer.slots:
            group = self._by_id[slot.key.group_id]
            with self._slot_view(group, slot) as view:
                ids = sources[slot.key.group_id, slot.key.unit_hash]
                self._mover.write_out(group.name, ids, view)
                digests.append(xxhash.xxh3_64_intdigest(view))
            await asyncio.sleep(0)
        request = kvcache_pb2.CommitStoreRequest(
            session_id=self._session_id, lease_id=answer.lease_id, digests=digests
        )
        committed = await self._call(self._stub.CommitStore, request)
        return int(committed.stored) == len(digests)

    async def _copy_in(
        self, needed: Sequence[_Placement], loaded: set[tuple[int, int]]
    ) -> list[kvcache_pb2.ObjectKey]:
        """Copy objects to their pages until one fails or time is up; returns the corrupt one."""
        deadline = time.monotonic() + self._load_seconds
        for placement in needed:
            if time.monotonic() > deadline:
                logger.warning(
                    "a load took longer than %g s; the rest is a miss", self._load_seconds
                )
                return []
            with self._slot_view(placement.group, placement.slot) as view:
                data = bytearray(view)
            if xxhash.xxh3_64_intdigest(data) != placement.slot.digest:
                logger.warning("dropped a corrupt object of group %s", placement.group.name)
                return [placement.slot.key]
            self._mover.read_in(placement.group.name, placement.ids, memoryview(data))
            loaded.add((placement.group.group_id, placement.unit))
            await asyncio.sleep(0)
        return []

    def _placements(
        self, job: LoadJob, slots: Sequence[kvcache_pb2.ObjectSlot]
    ) -> list[_Placement]:
        """The offered objects that have a destination, in the order of the units."""
        units = {bytes(h): i for i, h in enumerate(job.unit_hashes)}
        result = []
        for slot in slots:
            group = self._by_id[slot.key.group_id]
            unit = units[slot.key.unit_hash]
            ids = job.destinations[group.name][unit - job.first_unit]
            if ids is not None:
                result.append(_Placement(group, unit, slot, ids))
        return result

    def _valid(self, job: LoadJob, have: set[tuple[int, int]]) -> int:
        """Longest prefix given the objects in `have` and all units before `first_unit`."""
        hit = longest_hit(
            self._groups,
            len(job.unit_hashes),
            lambda group, unit: unit < job.first_unit or (group.group_id, unit) in have,
        )
        return max(hit, job.first_unit)

    def _slot_view(self, group: Group, slot: kvcache_pb2.ObjectSlot) -> memoryview:
        """The bytes of a slot in our mapping, its bounds checked."""
        ref = slot.ref
        if ref.region_id != self._arena.region_id or ref.generation != self._arena.generation:
            raise SessionLost("a slot names another region")
        if ref.nbytes != group.object_bytes or ref.offset + ref.nbytes > self._arena.nbytes:
            raise SessionLost("a slot lies outside the arena or has another size")
        return self._arena.view[ref.offset : ref.offset + ref.nbytes]

    async def _call(self, method: Callable[..., Awaitable[T]], request: Any) -> T:
        """One call. A refusal that leaves the session whole passes on as ServiceError."""
        try:
            return await method(request, timeout=self._call_seconds, metadata=request_metadata())
        except grpc.RpcError as error:
            refused = from_rpc_error(error)
            if refused.reason in _HARMLESS:
                raise refused from error
            raise SessionLost(refused.reason_name) from error


def store_groups(mover: PageMover) -> tuple[Group, ...]:
    """The mover's groups as the store knows them; ids are their positions."""
    return tuple(
        Group(i, g.name, g.kind, mover.window_units(g.name), mover.object_bytes(g.name))
        for i, g in enumerate(mover.groups)
    )
