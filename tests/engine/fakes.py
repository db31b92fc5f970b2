"""Stand-ins for the neighbours of the core: a drafter and an external store in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence

from services.engine.cache.external import (
    LoadDone,
    LoadJob,
    LookupDone,
    StoreDone,
    StoreEvent,
    StoreJob,
    UnitHash,
)
from services.engine.cache.mover import PageMover
from services.engine.scheduler.plan import SequenceId
from tests.engine.toy_model import VOCAB, reference_greedy


class HalfRightDrafts:
    """Proposes the true continuation with each token wrong at a given rate."""

    def __init__(self, wrong: float, seed: int = 0) -> None:
        self._wrong = wrong
        self._rng = random.Random(seed)

    def propose(self, sequence: SequenceId, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        count = self._rng.randrange(limit + 1)
        truth = reference_greedy(tokens, count)
        return tuple(
            self._rng.randrange(VOCAB) if self._rng.random() < self._wrong else t for t in truth
        )


class MemoryStore:
    """An external store that answers after `delay` polls, and fails when told to.

    `objects` outlives the core, as the real store does. The bytes are copied when a job is
    answered, the latest moment that the contract allows.
    """

    def __init__(self, objects: dict[tuple[UnitHash, str], bytes], delay: int = 2) -> None:
        self.objects = objects
        self.delay = delay
        self.connected = True
        self.silent = False  # answers no look-up
        self.short_by = 0  # units that every load falls short of
        self.refuses = False  # takes no unit
        self.stored_units = 0
        self.loads: list[LoadJob] = []
        self._mover: PageMover | None = None
        self._due: list[tuple[int, LoadJob | StoreJob | LookupDone]] = []
        self._polls = 0

    @property
    def mover(self) -> PageMover:
        assert self._mover is not None
        return self._mover

    def bind(self, mover: PageMover) -> None:
        assert self._mover is None
        self._mover = mover

    def lookup(self, request_id: str, unit_hashes: Sequence[UnitHash]) -> None:
        hit = next(
            (k for k in range(len(unit_hashes), 0, -1) if self._restorable(unit_hashes[:k])), 0
        )
        if not self.silent:
            self._later(LookupDone(request_id, hit))

    def load(self, job: LoadJob) -> None:
        self.loads.append(job)
        self._later(job)

    def store(self, job: StoreJob) -> None:
        self._later(job)

    def poll(self) -> list[StoreEvent]:
        self._polls += 1
        due = [item for at, item in self._due if at <= self._polls]
        self._due = [(at, item) for at, item in self._due if at > self._polls]
        return [self._answer(item) for item in due]

    def _later(self, item: LoadJob | StoreJob | LookupDone) -> None:
        self._due.append((self._polls + self.delay, item))

    def _answer(self, item: LoadJob | StoreJob | LookupDone) -> StoreEvent:
        match item:
            case LoadJob():
                return LoadDone(item.job, self._read(item))
            case StoreJob():
                return StoreDone(item.job, self._write(item))
            case LookupDone():
                return item

    def _restorable(self, hashes: Sequence[UnitHash]) -> bool:
        return all((hashes[k], name) in self.objects for name, k in self._needed(len(hashes)))

    def _needed(self, units: int) -> list[tuple[str, int]]:
        first = {
            g.name: {
                "paged": 0,
                "window": units - self.mover.window_units(g.name),
                "state": units - 1,
            }[g.kind]
            for g in self.mover.groups
        }
        return [(name, k) for name, low in first.items() for k in range(max(0, low), units)]

    def _read(self, job: LoadJob) -> int:
        valid = max(job.first_unit, len(job.unit_hashes) - self.short_by)
        for name, units in job.destinations.items():
            for offset, ids in enumerate(units):
                number = job.first_unit + offset
                if ids is None:
                    continue
                data = self.objects[(job.unit_hashes[number], name)]
                if number >= valid:
                    data = b"\xa5" * len(data)
                self.mover.read_in(name, ids, memoryview(data))
        return valid

    def _write(self, job: StoreJob) -> bool:
        if self.refuses or not self.connected:
            return False
        for name, ids in job.sources.items():
            out = bytearray(self.mover.object_bytes(name))
            self.mover.write_out(name, ids, memoryview(out))
            key = (job.unit_hash, name)
            assert self.objects.setdefault(key, bytes(out)) == bytes(out), "other bytes, same name"
        self.stored_units += 1
        return True
