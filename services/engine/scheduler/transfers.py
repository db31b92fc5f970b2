"""Everything between the prefix index and the external store: look-ups, loads, stores."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

from services.common.prefix_chain import UnitHash
from services.engine.cache.external import (
    ExternalStore,
    JobId,
    LoadDone,
    LoadJob,
    LookupDone,
    StoreDone,
    StoreJob,
)
from services.engine.cache.manager import CacheManager
from services.engine.cache.spec import PageId, SlotId
from services.engine.scheduler.sequence import Phase, Sequence
from services.engine.scheduler.state import SchedulerState

Destinations = dict[str, tuple[tuple[PageId | SlotId, ...] | None, ...]]


@dataclass(frozen=True, slots=True)
class _Offer:
    """Groups of one unit that are to be stored."""

    unit_hash: UnitHash
    groups: tuple[str, ...]


class Transfers:
    """Runs the jobs of one store. The ids of a job are pinned until it is answered."""

    def __init__(self, state: SchedulerState, store: ExternalStore | None) -> None:
        self._state = state
        self._cache: CacheManager = state.cache
        self._config = state.config
        self._store = store
        self._job_ids = count()
        self._lookups: dict[str, Sequence] = {}
        self._loads: dict[JobId, tuple[LoadJob, Sequence]] = {}
        self._stores: dict[JobId, StoreJob] = {}
        self._offers: deque[_Offer] = deque()
        self._was_connected = False

    @property
    def connected(self) -> bool:
        """Whether there is a store that can be used now."""
        return self._store is not None and self._store.connected

    @property
    def in_flight(self) -> int:
        """Jobs and look-ups without an answer, and units still to be stored."""
        return len(self._lookups) + len(self._loads) + len(self._stores) + len(self._offers)

    def look_up(self, s: Sequence, now: float) -> None:
        """Ask the store about a new sequence, unless the pools have all that it can use."""
        hashes = s.restorable_hashes
        if self._store is None or not self._store.connected:
            return
        if self._cache.index.match(hashes).units >= len(hashes):
            return
        tag = f"{s.state.request.request_id}#{s.id}"  # ids of requests may come again
        s.phase, s.lookup_deadline = Phase.LOOKUP, now + self._config.lookup_timeout_seconds
        self._lookups[tag] = s
        self._state.counters.external_query_tokens += len(hashes) * self._cache.unit_tokens
        self._store.lookup(tag, hashes)

    def keep(self, hashes: Seq[UnitHash]) -> None:
        """A prefix can be restored up to its last unit: store what the store lacks of it."""
        if not self.connected:
            return
        offers: list[_Offer] = []
        for number in range(len(hashes) - 1, -1, -1):
            offer = self._offer(hashes, number)
            if offer is None and len(hashes) - number > self._longest_window():
                break
            if offer is not None:
                offers.append(offer)
        self._offers.extend(reversed(offers))

    def poll(self, now: float) -> None:
        """Take answers, give up on late look-ups, start what can start."""
        if self._store is None:
            return
        if self._store.connected and not self._was_connected:
            self._forget_stored()
        self._was_connected = self._store.connected
        for event in self._store.poll():
            match event:
                case LookupDone():
                    self._looked_up(event)
                case LoadDone():
                    self._loaded(event)
                case StoreDone():
                    self._stored(event)
        self._expire(now)
        self._start_loads()
        self._start_stores()

    def pins(self) -> dict[str, list[int]]:
        """Ids held by jobs, per group, for checks."""
        pins: dict[str, list[int]] = {}
        for job, _ in self._loads.values():
            for name, units in job.destinations.items():
                pins.setdefault(name, []).extend(i for ids in units for i in ids or ())
        for store_job in self._stores.values():
            for name, ids in store_job.sources.items():
                pins.setdefault(name, []).extend(ids)
        return pins

    def _longest_window(self) -> int:
        return max(self._cache.window_units.values(), default=0)

    def _offer(self, hashes: Seq[UnitHash], number: int) -> _Offer | None:
        """What a hit of all `hashes` needs of unit `number` and the store lacks; now claimed."""
        unit = self._cache.index.get(hashes[number])
        if unit is None:
            return None
        wanted = [
            name
            for name in unit.ids
            if name not in unit.stored and self._needed(name, number, len(hashes))
        ]
        unit.stored.update(wanted)
        return _Offer(unit.hash, tuple(wanted)) if wanted else None

    def _needed(self, name: str, number: int, units: int) -> bool:
        """Whether a hit of `units` needs unit `number` of this group."""
        if name in self._cache.state_groups:
            return number == units - 1
        return number >= units - self._cache.window_units.get(name, units)

    def _looked_up(self, event: LookupDone) -> None:
        s = self._lookups.pop(event.request_id, None)
        if s is not None and s.phase is Phase.LOOKUP:
            s.external_units = min(event.hit_units, len(s.restorable_hashes))
            s.phase = Phase.LOADABLE if s.external_units else Phase.READY

    def _expire(self, now: float) -> None:
        for tag, s in tuple(self._lookups.items()):
            if s.phase is not Phase.LOOKUP:
                del self._lookups[tag]
            elif now >= s.lookup_deadline:
                s.phase = Phase.READY
                del self._lookups[tag]

    def _start_loads(self) -> None:
        for s in self._state.waiting:
            if len(self._loads) >= self._config.max_loads:
                return
            if s.phase is Phase.LOADABLE:
                s.phase = Phase.READY
                self._start_load(s)

    def _start_load(self, s: Sequence) -> None:
        """Load what the pools lack of the store's hit, if there is room for it."""
        hashes = tuple(s.restorable_hashes[: s.external_units])
        found = self._cache.index.match(hashes)
        s.local_units = found.units
        if self._store is None or not self._store.connected or found.units == len(hashes):
            return
        self._cache.index.refresh(hashes[: found.chain])
        first = max(0, min(found.chain, len(hashes) - max(1, self._longest_window())))
        destinations = self._destinations(hashes, first)
        if destinations is None:
            return
        job = LoadJob(
            JobId(next(self._job_ids)), s.state.request.request_id, hashes, first, destinations
        )
        self._loads[job.job] = (job, s)
        s.phase = Phase.LOADING
        self._store.load(job)

    def _destinations(self, hashes: tuple[UnitHash, ...], first: int) -> Destinations | None:
        """Fresh ids for every object that is needed and not here; None where they do not fit."""
        lacking = {
            g.name: [
                self._needed(g.name, n, len(hashes)) and not self._has(hashes[n], g.name)
                for n in range(first, len(hashes))
            ]
            for g in self._cache.groups
        }
        sizes = {g.name: self._cache.object_ids(g.name) for g in self._cache.groups}
        pools = self._cache.pools
        if any(pools[n].available < sum(lacks) * sizes[n] for n, lacks in lacking.items()):
            return None
        return {
            name: tuple(self._fresh(name, sizes[name]) if lacks else None for lacks in units)
            for name, units in lacking.items()
        }

    def _fresh(self, name: str, ids: int) -> tuple[PageId | SlotId, ...] | None:
        taken = self._cache.take(name, ids)
        if taken is None:
            return None
        self._cache.pools[name].keep_contents(taken)
        return tuple(PageId(i) for i in taken)

    def _has(self, unit_hash: UnitHash, name: str) -> bool:
        unit = self._cache.index.get(unit_hash)
        return unit is not None and name in unit.ids

    def _loaded(self, event: LoadDone) -> None:
        """Index the valid units; whatever else the job had is cleared and given back."""
        job, s = self._loads.pop(event.job)
        for number in range(job.first_unit, len(job.unit_hashes)):
            ids = {
                name: tuple(int(i) for i in found)
                for name, units in job.destinations.items()
                if (found := units[number - job.first_unit]) is not None
            }
            if number < event.valid_units:
                self._index_loaded(job, s, number, ids)
            else:
                self._condemn(ids)
            for name, group_ids in ids.items():
                self._cache.pools[name].release(group_ids)
        if s.phase is Phase.LOADING:
            s.phase = Phase.READY

    def _index_loaded(
        self, job: LoadJob, s: Sequence, number: int, ids: dict[str, tuple[int, ...]]
    ) -> None:
        parent = s.chain.parent(number)
        if number and self._cache.index.get(parent) is None:
            return
        unit = self._cache.index.add(job.unit_hashes[number], parent, ids)
        if unit is not None:
            unit.stored.update(ids)
            unit.kept.update(name for name in ids if name in unit.ids)

    def _condemn(self, ids: dict[str, tuple[int, ...]]) -> None:
        for name, group_ids in ids.items():
            self._cache.pools[name].condemn(group_ids)

    def _start_stores(self) -> None:
        while self._offers and len(self._stores) < self._config.max_stores:
            self._start_store(self._offers.popleft())

    def _start_store(self, offer: _Offer) -> None:
        unit = self._cache.index.get(offer.unit_hash)
        if unit is None or self._store is None:
            return
        sources: dict[str, tuple[PageId | SlotId, ...]] = {
            name: tuple(PageId(i) for i in unit.ids[name])
            for name in offer.groups
            if name in unit.ids
        }
        if not sources or not self._store.connected:
            unit.stored.difference_update(offer.groups)
            return
        for name, ids in sources.items():
            self._cache.pools[name].share(ids)
        job = StoreJob(JobId(next(self._job_ids)), offer.unit_hash, sources)
        self._stores[job.job] = job
        self._store.store(job)

    def _stored(self, event: StoreDone) -> None:
        job = self._stores.pop(event.job)
        for name, ids in job.sources.items():
            self._cache.pools[name].release(ids)
        unit = self._cache.index.get(job.unit_hash)
        if unit is not None and not event.stored:
            unit.stored.difference_update(job.sources)

    def _forget_stored(self) -> None:
        """A store that was away may have lost what it had."""
        for unit in self._cache.index.units():
            unit.stored.clear()
