"""Sessions, leases and two-phase stores over the arena. No gRPC in here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import xxhash
from warhorse.v1 import common_pb2

from services.common.errors import ServiceError
from services.kvcache.catalogue import Catalogue, Model
from services.kvcache.storage import ArenaStorage, ObjectKey, Slot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placed:
    """An object and its bytes in the arena; `digest` is 0 before its commit."""

    key: ObjectKey
    slot: Slot
    digest: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A read lease: what a hit of `hit_units` needs, pinned. No lease when nothing hit."""

    lease_id: str
    hit_units: int
    objects: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    """A write lease. No lease when every key is stored, or being stored, already."""

    lease_id: str
    objects: tuple[Placed, ...]
    unplaced: tuple[ObjectKey, ...]  # found no room


@dataclass(slots=True)
class Session:
    """One client's stay; owns its leases."""

    session_id: str
    client_id: str
    model: Model
    reads: dict[str, tuple[ObjectKey, ...]] = field(default_factory=dict)
    writes: dict[str, tuple[Placed, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    lookups: int = 0
    hit_units: int = 0
    stored_objects: int = 0
    evicted_objects: int = 0
    corrupt_objects: int = 0


class KvStore:
    """Owns the objects of the arena and every lease on them. One caller: the event loop.

    An object is reserved, then committed with the digest of its bytes; only a committed object is
    ever visible. Pins and reservations end with their lease or with the session that holds it,
    never by time while the session lives.
    """

    def __init__(
        self,
        make_storage: Callable[[Callable[[Sequence[ObjectKey]], None]], ArenaStorage],
        generation: int,
        grace_seconds: float,
    ) -> None:
        self.counters = Counters()
        self._catalogue = Catalogue()
        self._evicted_lock = threading.Lock()
        self._storage = make_storage(self._removed)
        self._generation = generation
        self._grace_seconds = grace_seconds
        self._sessions: dict[str, Session] = {}
        self._orphans: dict[str, tuple[tuple[Placed, ...], asyncio.TimerHandle]] = {}
        self._committing: set[str] = set()
        self._doomed: set[ObjectKey] = set()  # dropped, but somebody still reads them
        self._key_names: dict[str, set[str]] = {}  # model fingerprint -> key names
        self._serial = itertools.count(1)

    # Sessions

    def open_session(self, client_id: str, model: Model) -> Session:
        """Begin a session; the caller closes it when the client's stream ends."""
        session = Session(self._new_id(), client_id, model)
        self._sessions[session.session_id] = session
        self._key_names.setdefault(model.fingerprint, set()).add(model.key_name)
        return session

    def session(self, session_id: str) -> Session:
        """The open session; STALE_GENERATION for one of an earlier life of this service."""
        session = self._sessions.get(session_id)
        if session is not None:
            return session
        if session_id.partition(".")[0] != f"{self._generation:016x}":
            raise ServiceError(
                common_pb2.ERROR_REASON_STALE_GENERATION,
                "the session belongs to another life of this service",
                field="session_id",
            )
        raise ServiceError(
            common_pb2.ERROR_REASON_UNKNOWN_LEASE, "the session has ended", field="session_id"
        )

    def close_session(self, session: Session) -> None:
        """Drop its pins now and its reservations after the grace period."""
        if self._sessions.pop(session.session_id, None) is None:
            return
        for keys in session.reads.values():
            self._unpin(keys)
        loop = asyncio.get_running_loop()
        for lease_id, objects in session.writes.items():
            timer = loop.call_later(self._grace_seconds, self._free_orphan, lease_id)
            self._orphans[lease_id] = (objects, timer)

    # Reading

    def lookup(self, session: Session, unit_hashes: Sequence[bytes]) -> int:
        """Units that could be loaded now. Takes no lease."""
        hit = self._hit(session, unit_hashes, 0)
        self.counters.lookups += 1
        self.counters.hit_units += hit
        return hit

    def begin_load(
        self, session: Session, unit_hashes: Sequence[bytes], first_unit: int = 0
    ) -> Loaded:
        """Pin what the longest possible hit needs from unit `first_unit` on.

        The client holds the units before `first_unit` already.
        """
        while (hit := self._hit(session, unit_hashes, first_unit)) > first_unit:
            keys = _needed(session.model, unit_hashes, hit, first_unit)
            slots = self._storage.pin(keys)
            digests = {key: self._catalogue.digest(key) for key in slots}
            if len(slots) == len(keys) and None not in digests.values():
                lease_id = self._new_id()
                session.reads[lease_id] = tuple(keys)
                placed = tuple(Placed(k, slots[k], digests[k] or 0) for k in keys)
                return Loaded(lease_id, hit, placed)
            self._unpin(tuple(slots))  # evicted since the look-up: try a shorter one
            self._catalogue.discard([key for key in keys if key not in slots])
        return Loaded("", min(hit, first_unit), ())

    def end_load(self, session: Session, lease_id: str, corrupt: Iterable[ObjectKey]) -> None:
        """Release a read lease; objects that its holder found corrupt are dropped."""
        keys = session.reads.get(lease_id)
        if keys is None:
            raise _unknown_lease()
        bad = list(corrupt)
        if not set(bad) <= set(keys):
            raise ServiceError(
                common_pb2.ERROR_REASON_INVALID_FIELD,
                "a corrupt object is not part of the lease",
                field="corrupt",
            )
        del session.reads[lease_id]
        self._unpin(keys)
        if bad:
            logger.warning("client %s found %d corrupt objects", session.client_id, len(bad))
            self.counters.corrupt_objects += self._drop(bad)

    # Writing

    def begin_store(self, session: Session, keys: Sequence[ObjectKey]) -> Reserved:
        """Reserve slots for the keys that are new; POOL_EXHAUSTED when none of them finds room."""
        self._storage.touch([key for key in keys if key in self._catalogue])
        slots: dict[ObjectKey, Slot | None] = {}
        for group in session.model.groups:
            wanted = [k for k in keys if k.object_group_id == group.group_id]
            slots |= self._storage.reserve(wanted, group.object_bytes)
        objects = tuple(Placed(k, slot) for k in keys if (slot := slots.get(k)) is not None)
        unplaced = tuple(k for k in keys if k in slots and slots[k] is None)
        if not objects:
            if unplaced:
                raise _exhausted()
            return Reserved("", (), ())
        lease_id = self._new_id()
        session.writes[lease_id] = objects
        return Reserved(lease_id, objects, unplaced)

    async def commit_store(self, session: Session, lease_id: str, digests: Sequence[int]) -> int:
        """Publish the objects whose bytes match their digest; returns how many are readable."""
        objects = session.writes.get(lease_id)
        if objects is None:
            raise _unknown_lease()
        if len(digests) != len(objects):
            raise ServiceError(
                common_pb2.ERROR_REASON_INVALID_FIELD,
                f"{len(digests)} digests for {len(objects)} slots",
                field="digests",
            )
        del session.writes[lease_id]  # from here on nobody else frees these slots
        self._committing.add(lease_id)
        try:
            found = await asyncio.to_thread(self._digests_of, objects)
        except BaseException:
            self._storage.abort([o.key for o in objects])
            raise
        finally:
            self._committing.discard(lease_id)
        return self._publish(objects, digests, found)

    def abort_store(self, session: Session, lease_id: str) -> None:
        """Free the slots of a write lease."""
        objects = session.writes.pop(lease_id, None)
        if objects is None:
            raise _unknown_lease()
        self._storage.abort([o.key for o in objects])

    # State

    def clear(self, fingerprint: str) -> int:
        """Drop the objects of a model, or of all; returns how many. Pinned bytes stay readable."""
        names = self._key_names.get(fingerprint, set()) if fingerprint else None
        return self._drop(self._catalogue.keys(names))

    def leases(self) -> tuple[int, int, int]:
        """Sessions, read leases and write leases (those that wait for their grace included)."""
        sessions = list(self._sessions.values())  # metrics are read from another thread
        reads = sum(len(s.reads) for s in sessions)
        writes = sum(len(s.writes) for s in sessions) + len(self._orphans) + len(self._committing)
        return len(sessions), reads, writes

    def usage(self) -> tuple[int, int, int]:
        """Used bytes, capacity in bytes and readable objects."""
        return *self._storage.usage(), len(self._catalogue)

    def check(self) -> None:
        """Raise if the arena's books do not add up."""
        self._storage.check()

    def close(self) -> None:
        """Stop timers and threads. No call may follow."""
        for _, timer in self._orphans.values():
            timer.cancel()
        self._storage.close()

    # Inside

    def _hit(self, session: Session, unit_hashes: Sequence[bytes], first_unit: int) -> int:
        return self._catalogue.hit_units(session.model, unit_hashes, first_unit)

    def _digests_of(self, objects: Sequence[Placed]) -> list[int]:
        return [xxhash.xxh3_64_intdigest(self._storage.bytes_of(o.slot)) for o in objects]

    def _publish(
        self, objects: Sequence[Placed], digests: Sequence[int], found: Sequence[int]
    ) -> int:
        """Commit the objects whose digest is right and free the others."""
        good, bad = [], []
        for placed, want, got in zip(objects, digests, found, strict=True):
            if want != got:
                bad.append(placed.key)
                continue
            good.append(placed.key)
            self._catalogue.add(placed.key, want)  # first: an eviction right after must find it
        lost = set(good) - set(self._storage.commit(good))
        self._catalogue.discard(list(lost))
        if bad:
            logger.warning("refused %d objects whose bytes do not match their digest", len(bad))
            self._storage.abort(bad)
            self.counters.corrupt_objects += len(bad)
        self.counters.stored_objects += len(good) - len(lost)
        return len(good) - len(lost)

    def _unpin(self, keys: Sequence[ObjectKey]) -> None:
        self._storage.unpin(keys)
        if leaving := self._doomed.intersection(keys):
            self._doomed -= leaving
            self._doomed.update(self._storage.remove(list(leaving)))

    def _drop(self, keys: Sequence[ObjectKey]) -> int:
        """Hide objects now and free them as soon as nobody reads them."""
        hidden = self._catalogue.discard(keys)
        self._doomed.update(self._storage.remove(keys))
        return hidden

    def _removed(self, keys: Sequence[ObjectKey]) -> None:
        """Objects left the arena; those still visible were evicted. Any thread."""
        evicted = self._catalogue.discard(keys)
        with self._evicted_lock:
            self.counters.evicted_objects += evicted

    def _free_orphan(self, lease_id: str) -> None:
        objects, _ = self._orphans.pop(lease_id)
        self._storage.abort([o.key for o in objects])

    def _new_id(self) -> str:
        return f"{self._generation:016x}.{next(self._serial)}.{secrets.token_hex(8)}"


def _needed(
    model: Model, unit_hashes: Sequence[bytes], hit_units: int, first_unit: int
) -> list[ObjectKey]:
    """Keys of a hit, unit by unit."""
    return [
        model.key(group.group_id, unit_hashes[unit])
        for unit in range(first_unit, hit_units)
        for group in model.groups
        if unit in group.needed(hit_units)
    ]


def _unknown_lease() -> ServiceError:
    return ServiceError(
        common_pb2.ERROR_REASON_UNKNOWN_LEASE, "no such lease in this session", field="lease_id"
    )


def _exhausted() -> ServiceError:
    return ServiceError(
        common_pb2.ERROR_REASON_POOL_EXHAUSTED,
        "the arena is full of objects in use",
        retry_after=1.0,
    )
