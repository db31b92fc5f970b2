"""`warhorse.v1.KvCacheService` over a `KvStore`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from warhorse.v1 import common_pb2, kvcache_pb2, kvcache_pb2_grpc, tensor_pb2

from services.common.describe import service_info
from services.common.errors import ServiceError
from services.common.metrics import Reading, single
from services.common.prefix_hits import Group, GroupKind
from services.common.shm import region_counts
from services.kvcache.catalogue import HASH_BYTES, Model
from services.kvcache.storage import ObjectKey
from services.kvcache.store import KvStore, Placed

logger = logging.getLogger(__name__)

SERVICE_NAME = "warhorse.v1.KvCacheService"
MAX_UNITS = 1 << 16  # units of one request


@dataclass(frozen=True, slots=True)
class Identity:
    """Who serves, and where the arena is."""

    instance: str
    generation: int
    arena: tensor_pb2.Region


class KvCacheServicer(kvcache_pb2_grpc.KvCacheServiceServicer):
    """Checks requests and translates; the store decides. Runs on one event loop."""

    def __init__(self, store: KvStore, identity: Identity, silence_seconds: float) -> None:
        self._store = store
        self._identity = identity
        self._silence_seconds = silence_seconds

    def readings(self) -> tuple[Reading, ...]:
        """What the metrics of the process show."""
        store = self._store
        gauges = (
            ("used_bytes", "Bytes of objects", lambda: store.usage()[0]),
            ("capacity_bytes", "Size of the arena", lambda: store.usage()[1]),
            ("objects", "Objects", lambda: store.usage()[2]),
            ("sessions", "Engines with a session", lambda: store.leases()[0]),
            ("read_leases", "Leases of loads", lambda: store.leases()[1]),
            ("write_leases", "Leases of stores", lambda: store.leases()[2]),
        )
        counters = (
            ("lookups", "Look-ups", lambda: store.counters.lookups),
            ("hit_units", "Units found by look-ups", lambda: store.counters.hit_units),
            ("stored_objects", "Objects stored", lambda: store.counters.stored_objects),
            ("evicted_objects", "Objects evicted", lambda: store.counters.evicted_objects),
            ("corrupt_objects", "Objects dropped as corrupt",
             lambda: store.counters.corrupt_objects),
        )  # fmt: skip
        return (
            *(Reading(f"warhorse:store_{n}", t, "gauge", single(r)) for n, t, r in gauges),
            *(Reading(f"warhorse:store_{n}", t, "counter", single(r)) for n, t, r in counters),
        )

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[kvcache_pb2.SessionRequest], context: Any
    ) -> None:
        """Hold a session for as long as the stream lives and the client pings."""
        requests = aiter(request_iterator)
        first = await self._next(requests)
        if first is None or first.WhichOneof("event") != "open":
            raise _invalid("event", "the first message of a session must be open")
        model = _model(first.open, self._store.usage()[1])
        session = self._store.open_session(first.open.client_id, model)
        logger.info("session opened", extra={"client": session.client_id})
        answer = kvcache_pb2.SessionResponse(
            session_id=session.session_id,
            generation=self._identity.generation,
            arena=self._identity.arena,
        )
        try:
            await context.write(answer)
            while await self._next(requests) is not None:
                await context.write(answer)
        finally:
            self._store.close_session(session)
            logger.info("session closed", extra={"client": session.client_id})

    async def _next(
        self, requests: AsyncIterator[kvcache_pb2.SessionRequest]
    ) -> kvcache_pb2.SessionRequest | None:
        """The client's next message; None when it has left, DEADLINE when it is silent."""
        try:
            async with asyncio.timeout(self._silence_seconds):
                return await anext(requests, None)
        except TimeoutError:
            raise ServiceError(
                common_pb2.ERROR_REASON_DEADLINE,
                f"no ping for {self._silence_seconds:g} seconds",
            ) from None

    async def Lookup(  # noqa: N802
        self, request: kvcache_pb2.LookupRequest, context: Any
    ) -> kvcache_pb2.LookupResponse:
        """Longest restorable prefix."""
        session = self._store.session(request.session_id)
        hit = self._store.lookup(session, _hashes(request.unit_hashes))
        logger.debug("looked up", extra={"units": len(request.unit_hashes), "hit_units": hit})
        return kvcache_pb2.LookupResponse(hit_units=hit)

    async def BeginLoad(  # noqa: N802
        self, request: kvcache_pb2.BeginLoadRequest, context: Any
    ) -> kvcache_pb2.BeginLoadResponse:
        """Pin what a load needs."""
        session = self._store.session(request.session_id)
        hashes = _hashes(request.unit_hashes)
        if request.first_unit > len(hashes):
            raise _invalid("first_unit", f"{request.first_unit} of {len(hashes)} units")
        loaded = self._store.begin_load(session, hashes, request.first_unit)
        logger.debug("load", extra={"hit_units": loaded.hit_units})
        return kvcache_pb2.BeginLoadResponse(
            lease_id=loaded.lease_id, hit_units=loaded.hit_units, slots=self._slots(loaded.objects)
        )

    async def EndLoad(  # noqa: N802
        self, request: kvcache_pb2.EndLoadRequest, context: Any
    ) -> kvcache_pb2.EndLoadResponse:
        """Release a read lease."""
        session = self._store.session(request.session_id)
        corrupt = _keys(session.model, request.corrupt, "corrupt")
        self._store.end_load(session, request.lease_id, corrupt)
        return kvcache_pb2.EndLoadResponse()

    async def BeginStore(  # noqa: N802
        self, request: kvcache_pb2.BeginStoreRequest, context: Any
    ) -> kvcache_pb2.BeginStoreResponse:
        """Reserve slots."""
        session = self._store.session(request.session_id)
        keys = _keys(session.model, request.keys, "keys")
        reserved = self._store.begin_store(session, keys)
        return kvcache_pb2.BeginStoreResponse(
            lease_id=reserved.lease_id,
            slots=self._slots(reserved.objects),
            unplaced=[_key_message(key) for key in reserved.unplaced],
        )

    async def CommitStore(  # noqa: N802
        self, request: kvcache_pb2.CommitStoreRequest, context: Any
    ) -> kvcache_pb2.CommitStoreResponse:
        """Publish what was written."""
        session = self._store.session(request.session_id)
        stored = await self._store.commit_store(session, request.lease_id, request.digests)
        return kvcache_pb2.CommitStoreResponse(stored=stored)

    async def AbortStore(  # noqa: N802
        self, request: kvcache_pb2.AbortStoreRequest, context: Any
    ) -> kvcache_pb2.AbortStoreResponse:
        """Free reserved slots."""
        session = self._store.session(request.session_id)
        self._store.abort_store(session, request.lease_id)
        return kvcache_pb2.AbortStoreResponse()

    async def Stats(  # noqa: N802
        self, request: kvcache_pb2.StatsRequest, context: Any
    ) -> kvcache_pb2.StatsResponse:
        """Counters and current use."""
        used, capacity, objects = self._store.usage()
        sessions, reads, writes = self._store.leases()
        regions, region_bytes = region_counts()
        counters = self._store.counters
        return kvcache_pb2.StatsResponse(
            service=service_info(self._identity.instance, self._identity.generation),
            capacity_bytes=capacity,
            used_bytes=used,
            objects=objects,
            sessions=sessions,
            read_leases=reads,
            write_leases=writes,
            lookups=counters.lookups,
            hit_units=counters.hit_units,
            stored_objects=counters.stored_objects,
            evicted_objects=counters.evicted_objects,
            corrupt_objects=counters.corrupt_objects,
            open_regions=regions,
            region_bytes=region_bytes,
        )

    async def Clear(  # noqa: N802
        self, request: kvcache_pb2.ClearRequest, context: Any
    ) -> kvcache_pb2.ClearResponse:
        """Drop objects."""
        return kvcache_pb2.ClearResponse(
            objects_dropped=self._store.clear(request.model_fingerprint)
        )

    def _slots(self, objects: Iterable[Placed]) -> list[kvcache_pb2.ObjectSlot]:
        return [
            kvcache_pb2.ObjectSlot(
                key=_key_message(o.key),
                ref=tensor_pb2.ShmRef(
                    region_id=self._identity.arena.region_id,
                    generation=self._identity.arena.generation,
                    offset=o.slot.offset,
                    nbytes=o.slot.nbytes,
                ),
                digest=o.digest,
            )
            for o in objects
        ]


def _model(request: kvcache_pb2.SessionOpen, capacity: int) -> Model:
    if not request.model_fingerprint:
        raise _invalid("model_fingerprint", "must not be empty")
    if not request.unit_tokens:
        raise _invalid("unit_tokens", "must be at least 1")
    groups = tuple(_group(g, capacity) for g in request.groups)
    if not groups or len({g.group_id for g in groups}) != len(groups):
        raise _invalid("groups", "must hold at least one group, each group_id once")
    return Model(request.model_fingerprint, request.unit_tokens, groups)


def _group(group: kvcache_pb2.StoreGroup, capacity: int) -> Group:
    if group.kind not in ("paged", "window", "state"):
        raise _invalid("groups.kind", f"{group.kind!r} is not one of paged, window, state")
    if (group.kind == "window") != (group.window_units > 0):
        raise _invalid("groups.window_units", "goes with kind window, and with no other")
    if not 0 < group.object_bytes <= capacity:
        raise _invalid(
            "groups.object_bytes",
            f"{group.object_bytes} bytes, accepted are 1 to {capacity}, the size of the arena",
        )
    kind: GroupKind = group.kind  # type: ignore[assignment]  # narrowed above
    return Group(group.group_id, group.name, kind, group.window_units, group.object_bytes)


def _hashes(unit_hashes: Sequence[bytes]) -> Sequence[bytes]:
    if len(unit_hashes) > MAX_UNITS:
        raise _invalid("unit_hashes", f"{len(unit_hashes)} units, at most {MAX_UNITS} are accepted")
    hashes = list(unit_hashes)
    if any(len(h) != HASH_BYTES for h in hashes):
        raise _invalid("unit_hashes", f"every hash must have {HASH_BYTES} bytes")
    return hashes


def _keys(model: Model, keys: Sequence[kvcache_pb2.ObjectKey], field: str) -> list[ObjectKey]:
    groups = {g.group_id for g in model.groups}
    _hashes([k.unit_hash for k in keys])
    if unknown := {k.group_id for k in keys} - groups:
        raise _invalid(field, f"group_id {min(unknown)} is not one of {sorted(groups)}")
    result = [model.key(k.group_id, k.unit_hash) for k in keys]
    if len(set(result)) != len(result):
        raise _invalid(field, "every key must occur once")
    return result


def _key_message(key: ObjectKey) -> kvcache_pb2.ObjectKey:
    return kvcache_pb2.ObjectKey(unit_hash=key.chunk_hash, group_id=key.object_group_id)


def _invalid(field: str, message: str) -> ServiceError:
    return ServiceError(common_pb2.ERROR_REASON_INVALID_FIELD, message, field=field)
