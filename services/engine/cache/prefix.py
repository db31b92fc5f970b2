"""The prefix index: which units of tokens are in the pools, and where."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from services.common.prefix_chain import UnitHash
from services.engine.cache.pool import IdPool
from services.engine.cache.spec import CacheGroup

Ids = tuple[int, ...]


@dataclass(slots=True)
class Unit:
    """One unit of a prefix. `ids` has every paged group, window and state groups if a snapshot.

    `kept` names the snapshot groups that outlive the turn that made them; `stored` those that the
    external store has or is getting.
    """

    hash: UnitHash
    parent: UnitHash
    ids: dict[str, Ids]
    used: int
    children: set[UnitHash] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Match:
    """Outcome of a search.

    `units` can be restored; `chain` is the number of units whose pages are there, snapshot or not:
    where it is longer, a snapshot at its end would have helped (a branch point).
    """

    units: int
    chain: int


class PrefixIndex:
    """Owns the cached units. Least recently used ones are evicted, children before parents."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        pools: dict[str, IdPool],
        window_units: dict[str, int],
    ) -> None:
        """`window_units[group]`: units that a hit needs of each window group."""
        self._pools = pools
        self._paged = tuple(g.name for g in groups if g.kind == "paged")
        self._states = tuple(g.name for g in groups if g.kind == "state")
        self._windows = window_units
        self._units: dict[UnitHash, Unit] = {}
        # Units with a snapshot of a group, least recently used first.
        self._snapshots: dict[str, OrderedDict[UnitHash, None]] = {
            name: OrderedDict() for name in (*self._windows, *self._states)
        }
        self._leaves: list[tuple[int, UnitHash]] = []  # heap; stale entries are skipped
        self._news: dict[UnitHash, bool] = {}  # units that a hit may end with: came or went
        self._tick = 0

    def __len__(self) -> int:
        return len(self._units)

    def get(self, unit_hash: UnitHash) -> Unit | None:
        """The unit, or None; does not count as a use."""
        return self._units.get(unit_hash)

    def units(self) -> Iterator[Unit]:
        """All units, for checks."""
        return iter(self._units.values())

    def match(self, hashes: Sequence[UnitHash]) -> Match:
        """Longest restorable prefix of `hashes`; changes nothing."""
        chain = 0
        while chain < len(hashes) and hashes[chain] in self._units:
            chain += 1
        for units in range(chain, 0, -1):
            if self._restorable(hashes[:chain], units):
                return Match(units, chain)
        return Match(0, chain)

    def touch(self, hashes: Sequence[UnitHash], units: int) -> None:
        """The first `units` of `hashes`, a match, were used just now."""
        for h in hashes[:units]:
            self._use(self._units[h])
        for name, count in self._windows.items():
            for h in hashes[max(0, units - count) : units]:
                self._snapshots[name].move_to_end(h)
        for name in self._states if units else ():
            self._snapshots[name].move_to_end(hashes[units - 1])

    def refresh(self, hashes: Sequence[UnitHash]) -> None:
        """These indexed units are about to be needed: evict them last."""
        for h in hashes:
            self._use(self._units[h])

    def add(self, unit_hash: UnitHash, parent: UnitHash, ids: dict[str, Ids]) -> Unit | None:
        """Index a unit, or give an indexed one the groups that it lacks; the ids must be used.

        None, and nothing changes, where the unit would miss pages of a paged group.
        """
        unit = self._units.get(unit_hash)
        if unit is None:
            if any(name not in ids for name in self._paged):
                return None
            unit = Unit(unit_hash, parent, {}, 0)
            self._units[unit_hash] = unit
            if parent in self._units:
                self._units[parent].children.add(unit_hash)
        for name, group_ids in ids.items():
            if name not in unit.ids:
                self._pools[name].index(group_ids)
                unit.ids[name] = group_ids
                if name in self._snapshots:
                    self._snapshots[name][unit_hash] = None
        if self._is_end(unit):
            self._news[unit_hash] = True
        self._use(unit)
        return unit

    def take_news(self) -> dict[UnitHash, bool]:
        """Units with which hits may end that came (True) or went (False) since the last time."""
        news, self._news = self._news, {}
        return news

    def drop_snapshot(self, unit_hash: UnitHash, name: str) -> None:
        """Forget the snapshot of one group, unless it is kept; pages stay indexed."""
        unit = self._units.get(unit_hash)
        if unit is not None and name in unit.ids and name not in unit.kept:
            self._drop_group(unit, name)

    def make_room(self, name: str, count: int) -> bool:
        """Evict until the pool of group `name` has `count` free ids; False where it cannot."""
        pool = self._pools[name]
        if pool.free < count and name in self._snapshots:
            self._evict_snapshots(name, count)
        elif pool.free < count:
            self._evict_units(lambda: pool.free < count)
        return pool.free >= count

    def forget(self, hashes: Iterable[UnitHash]) -> None:
        """Remove units and everything that follows them, used or not."""
        doomed = list(hashes)
        while doomed:
            unit = self._units.get(doomed.pop())
            if unit is not None:
                doomed.extend(unit.children)
                self._remove(unit)

    def clear(self) -> None:
        """Remove every unit whose pages nobody uses, children before parents."""
        self._evict_units(lambda: True, unused_only=True)

    def _restorable(self, hashes: Sequence[UnitHash], units: int) -> bool:
        last = self._units[hashes[units - 1]]
        return all(name in last.ids for name in self._states) and all(
            name in self._units[h].ids
            for name, count in self._windows.items()
            for h in hashes[max(0, units - count) : units]
        )

    def _use(self, unit: Unit) -> None:
        self._tick += 1
        unit.used = self._tick
        if not unit.children:
            heapq.heappush(self._leaves, (unit.used, unit.hash))

    def _in_use(self, unit: Unit) -> bool:
        return any(self._pools[n].references(i) for n in unit.ids for i in unit.ids[n])

    def _evict_snapshots(self, name: str, count: int) -> None:
        pool = self._pools[name]
        for h in tuple(self._snapshots[name]):
            if pool.free >= count:
                return
            unit = self._units[h]
            if not any(pool.references(i) for i in unit.ids[name]):
                self._drop_group(unit, name)

    def _evict_units(self, wanted: Callable[[], bool], *, unused_only: bool = False) -> None:
        """Remove leaves, oldest first, while `wanted`; those in use last, if at all.

        Removing a unit in use frees none of its pages, but its parents may be unused.
        """
        passed: list[tuple[int, UnitHash]] = []
        while wanted() and self._leaves:
            entry = heapq.heappop(self._leaves)
            unit = self._leaf(entry)
            if unit is not None and self._in_use(unit):
                passed.append(entry)
            elif unit is not None:
                self._remove(unit)
        for entry in passed:
            heapq.heappush(self._leaves, entry)
        if not unused_only:
            self._evict_used(wanted)

    def _evict_used(self, wanted: Callable[[], bool]) -> None:
        while wanted() and self._leaves:
            unit = self._leaf(heapq.heappop(self._leaves))
            if unit is not None:
                self._remove(unit)

    def _leaf(self, entry: tuple[int, UnitHash]) -> Unit | None:
        """The unit of a heap entry, or None where the entry is stale."""
        unit = self._units.get(entry[1])
        fresh = unit is not None and not unit.children and unit.used == entry[0]
        return unit if fresh else None

    def _is_end(self, unit: Unit) -> bool:
        """Whether the unit has what a hit needs of its last unit."""
        return all(name in unit.ids for name in self._snapshots)

    def _drop_group(self, unit: Unit, name: str) -> None:
        if self._is_end(unit):
            self._news[unit.hash] = False
        self._pools[name].unindex(unit.ids.pop(name))
        unit.kept.discard(name)
        if name in self._snapshots:
            del self._snapshots[name][unit.hash]

    def _remove(self, unit: Unit) -> None:
        for name in tuple(unit.ids):
            self._drop_group(unit, name)
        del self._units[unit.hash]
        above = self._units.get(unit.parent)
        if above is not None:
            above.children.discard(unit.hash)
            if not above.children:
                heapq.heappush(self._leaves, (above.used, above.hash))
