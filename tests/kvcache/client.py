"""A plain client of the kvcache service that follows the contract step by step."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from warhorse.v1 import kvcache_pb2, kvcache_pb2_grpc

from services.common.grpc_client import connect
from services.common.shm import MappedRegion, open_region

UNIT_TOKENS = 64
# Three kinds of groups with odd sizes: (id, kind, window units, object bytes).
GROUPS = ((0, "paged", 0, 8192), (1, "window", 2, 5000), (2, "state", 0, 12_345))
SIZES = {group: size for group, _, _, size in GROUPS}


def unit_chain(count: int, salt: bytes = b"") -> list[bytes]:
    """Hashes of `count` units, each over the one before it."""
    chain = [hashlib.sha256(b"units" + salt).digest()]
    while len(chain) < count:
        chain.append(hashlib.sha256(chain[-1]).digest())
    return chain[:count]


def object_content(group: int, unit_hash: bytes) -> bytes:
    """The only right content of an object: a function of its key."""
    seed = xxhash.xxh3_64_intdigest(unit_hash + bytes([group]))
    return np.random.default_rng(seed).bytes(SIZES[group])


def keys_of(hashes: Iterable[bytes], groups: Sequence[int] = (0, 1, 2)) -> list[Any]:
    """Keys of every group of every unit."""
    return [kvcache_pb2.ObjectKey(unit_hash=h, group_id=g) for h in hashes for g in groups]


@dataclass
class Client:
    """One session and its mapping of the arena."""

    stub: kvcache_pb2_grpc.KvCacheServiceStub
    stream: Any
    session_id: str
    generation: int
    arena: MappedRegion

    def slot(self, slot: Any) -> memoryview:
        """The bytes of a slot."""
        return self.arena.view[slot.ref.offset : slot.ref.offset + slot.ref.nbytes]

    async def lookup(self, hashes: Sequence[bytes]) -> int:
        request = kvcache_pb2.LookupRequest(session_id=self.session_id, unit_hashes=hashes)
        return int((await self.stub.Lookup(request, timeout=5)).hit_units)

    async def begin_store(self, keys: Sequence[Any]) -> Any:
        request = kvcache_pb2.BeginStoreRequest(session_id=self.session_id, keys=keys)
        return await self.stub.BeginStore(request, timeout=5)

    async def commit(self, lease_id: str, digests: Sequence[int]) -> int:
        request = kvcache_pb2.CommitStoreRequest(
            session_id=self.session_id, lease_id=lease_id, digests=digests
        )
        return int((await self.stub.CommitStore(request, timeout=5)).stored)

    async def abort(self, lease_id: str) -> None:
        request = kvcache_pb2.AbortStoreRequest(session_id=self.session_id, lease_id=lease_id)
        await self.stub.AbortStore(request, timeout=5)

    async def store(self, keys: Sequence[Any]) -> int:
        """Store objects with their right content; returns how many the service took."""
        begun = await self.begin_store(keys)
        if not begun.lease_id:
            return 0
        digests = []
        for slot in begun.slots:
            content = object_content(slot.key.group_id, slot.key.unit_hash)
            self.slot(slot)[:] = content
            digests.append(xxhash.xxh3_64_intdigest(content))
        return await self.commit(begun.lease_id, digests)

    async def begin_load(self, hashes: Sequence[bytes], first_unit: int = 0) -> Any:
        request = kvcache_pb2.BeginLoadRequest(
            session_id=self.session_id, unit_hashes=hashes, first_unit=first_unit
        )
        return await self.stub.BeginLoad(request, timeout=5)

    async def end_load(self, lease_id: str, corrupt: Sequence[Any] = ()) -> None:
        request = kvcache_pb2.EndLoadRequest(
            session_id=self.session_id, lease_id=lease_id, corrupt=corrupt
        )
        await self.stub.EndLoad(request, timeout=5)

    async def load(self, hashes: Sequence[bytes]) -> int:
        """Load and compare every byte; returns the units of the hit."""
        begun = await self.begin_load(hashes)
        for slot in begun.slots:
            content = object_content(slot.key.group_id, slot.key.unit_hash)
            assert bytes(self.slot(slot)) == content
            assert slot.digest == xxhash.xxh3_64_intdigest(content)
        if begun.lease_id:
            await self.end_load(begun.lease_id)
        return int(begun.hit_units)


def open_request(fingerprint: str = "model-a", client_id: str = "test") -> Any:
    """The first message of a session."""
    groups = [
        kvcache_pb2.StoreGroup(
            group_id=g, name=kind, kind=kind, window_units=window, object_bytes=size
        )
        for g, kind, window, size in GROUPS
    ]
    opened = kvcache_pb2.SessionOpen(
        client_id=client_id, model_fingerprint=fingerprint, unit_tokens=UNIT_TOKENS, groups=groups
    )
    return kvcache_pb2.SessionRequest(open=opened)


@contextlib.asynccontextmanager
async def session(
    address: str, run_dir: Path, fingerprint: str = "model-a", *, pings: bool = True
) -> AsyncIterator[Client]:
    """A client for the duration of the block; the session ends with it."""
    async with connect(address) as channel:
        stub = kvcache_pb2_grpc.KvCacheServiceStub(channel)
        stream = stub.Session()
        await stream.write(open_request(fingerprint))
        opened = await stream.read()
        heart = asyncio.ensure_future(_ping(stream) if pings else asyncio.sleep(0))
        with open_region(opened.arena, run_dir) as arena:
            yield Client(stub, stream, opened.session_id, opened.generation, arena)
        heart.cancel()
        stream.cancel()


async def _ping(stream: Any) -> None:
    while True:
        await asyncio.sleep(0.3)
        await stream.write(kvcache_pb2.SessionRequest(ping=kvcache_pb2.SessionPing()))
        await stream.read()


async def stats(address: str) -> Any:
    """The service's counters."""
    async with connect(address) as channel:
        stub = kvcache_pb2_grpc.KvCacheServiceStub(channel)
        return await stub.Stats(kvcache_pb2.StatsRequest(), timeout=5)
