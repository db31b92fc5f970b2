"""The external prefix store as the engine core sees it: nothing blocks, answers come by poll."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol, TypeAlias

from services.common.prefix_chain import UnitHash
from services.engine.cache.mover import PageMover
from services.engine.cache.spec import PageId, SlotId

JobId = NewType("JobId", int)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Bring `unit_hashes[first_unit:]` into the pools.

    `unit_hashes` is the whole prefix from the first token; the units before `first_unit` are held
    already. `destinations[group][i]` are the ids for unit `first_unit + i`, or None where that
    unit's object of this group is not wanted: paged groups want every unit, window groups the last
    `mover.window_units(group)` units, state groups the last unit alone. The ids are pinned, and
    written by nobody else, until LoadDone.
    """

    job: JobId
    request_id: str
    unit_hashes: tuple[UnitHash, ...]
    first_unit: int
    destinations: dict[str, tuple[tuple[PageId | SlotId, ...] | None, ...]]


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Keep the objects of one unit: the ids of each group that has one now.

    A unit may come again later with further groups (a snapshot taken after its pages). The ids
    are pinned and their contents constant until StoreDone.
    """

    job: JobId
    unit_hash: UnitHash
    sources: dict[str, tuple[PageId | SlotId, ...]]


@dataclass(frozen=True, slots=True)
class LookupDone:
    """Longest prefix, in units, that every group can restore; 0 for a miss or a failure."""

    request_id: str
    hit_units: int


@dataclass(frozen=True, slots=True)
class LoadDone:
    """The first `valid_units` units of the whole prefix are in the pools, none after them.

    Equal to len(unit_hashes) on success; a short or failed load says so here (at least
    `first_unit` always holds). Contents of the destinations beyond it are undefined.
    """

    job: JobId
    valid_units: int


@dataclass(frozen=True, slots=True)
class StoreDone:
    """The sources may change again; `stored` is False when the store did not take them."""

    job: JobId
    stored: bool


StoreEvent: TypeAlias = LookupDone | LoadDone | StoreDone


class ExternalStore(Protocol):
    """A second tier of the prefix index. One caller, the core's thread; no call blocks.

    Every accepted job is answered exactly once, also after the connection is lost (LoadDone with
    `valid_units == first_unit`, StoreDone with `stored` False), and only when nothing touches its
    ids any more.
    """

    @property
    def connected(self) -> bool:
        """Whether look-ups and jobs are worth starting."""
        ...

    def bind(self, mover: PageMover) -> None:
        """Called once, before any other call: the catalogue of groups and their contents."""
        ...

    def lookup(self, request_id: str, unit_hashes: Sequence[UnitHash]) -> None:
        """Ask for the longest restorable prefix; answered by LookupDone."""
        ...

    def load(self, job: LoadJob) -> None: ...

    def store(self, job: StoreJob) -> None: ...

    def poll(self) -> list[StoreEvent]:
        """Everything finished since the last call."""
        ...
