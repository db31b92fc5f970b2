"""The cache of one model: pools and prefix index together, and what sequences hold of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.common.prefix_chain import UnitHash
from services.engine.cache.mover import PageMover
from services.engine.cache.pool import IdPool, InvariantError
from services.engine.cache.prefix import Match, PrefixIndex, Unit
from services.engine.cache.spec import PageId, SlotId


@dataclass(slots=True)
class SequenceTable:
    """The pages and the state slot that one sequence holds a reference on.

    `pages[group]` covers the tokens from 0 on; the first `freed[group]` entries of a window group
    were given back (-1). `states[group]` is the slot with the state after the last computed token;
    None before the first.
    """

    pages: dict[str, list[int]]
    freed: dict[str, int]
    states: dict[str, int | None] = field(default_factory=dict)

    def held(self, group: str) -> list[int]:
        """Ids of a group on which this table holds a reference."""
        if group in self.pages:
            return self.pages[group][self.freed.get(group, 0) :]
        slot = self.states[group]
        return [] if slot is None else [slot]


class CacheManager:
    """Owns the pools' books and the index of one core; the only place that takes and frees ids."""

    def __init__(self, mover: PageMover, sizes: dict[str, int], *, poison: bool = False) -> None:
        groups = mover.groups
        self.groups = groups
        self.unit_tokens = mover.unit_tokens
        self.page_groups = tuple(g for g in groups if g.kind != "state")
        self.state_groups = tuple(g.name for g in groups if g.kind == "state")
        self.window_units = {
            g.name: mover.window_units(g.name) for g in groups if g.kind == "window"
        }
        self.pools = {g.name: IdPool(g.name, sizes[g.name], poison=poison) for g in groups}
        self.index = PrefixIndex(groups, self.pools, self.window_units)

    @property
    def has_snapshots(self) -> bool:
        """Whether a hit needs more than paged groups."""
        return bool(self.state_groups or self.window_units)

    def take(self, group: str, count: int) -> list[int] | None:
        """`count` ids with one reference each, evicting cached ones; None where there are fewer."""
        if not self.index.make_room(group, count):
            return None
        return self.pools[group].take(count)

    def bind(self, hashes: Sequence[UnitHash], match: Match) -> SequenceTable:
        """A table that shares the units of a match."""
        table = SequenceTable(
            pages={g.name: [] for g in self.page_groups},
            freed=dict.fromkeys(self.window_units, 0),
            states=dict.fromkeys(self.state_groups, None),
        )
        self.index.touch(hashes, match.units)
        for name, ids in self.restored(hashes, match.units):
            self.pools[name].share(ids)
            if name in table.states:
                table.states[name] = ids[0]
            else:
                table.pages[name].extend(ids)
        for name, count in self.window_units.items():
            per_unit = self.unit_pages(name)
            table.freed[name] = max(0, match.units - count) * per_unit
            table.pages[name][:0] = [-1] * table.freed[name]
        return table

    def restored(
        self, hashes: Sequence[UnitHash], units: int
    ) -> Iterable[tuple[str, tuple[int, ...]]]:
        """What a hit of `units` shares: (group, ids) in the order of the tokens."""
        for number, h in enumerate(hashes[:units]):
            unit = self.unit(h)
            for g in self.page_groups:
                if number >= units - self.window_units.get(g.name, units):
                    yield g.name, unit.ids[g.name]
        if units:
            for name in self.state_groups:
                yield name, self.unit(hashes[units - 1]).ids[name]

    def unit(self, unit_hash: UnitHash) -> Unit:
        """An indexed unit; raises InvariantError where it is not there."""
        unit = self.index.get(unit_hash)
        if unit is None:
            raise InvariantError(f"unit {unit_hash.hex()} is not in the prefix index")
        return unit

    def unit_pages(self, group: str) -> int:
        """Pages of one unit in a paged or window group."""
        return next(self.unit_tokens // g.page_tokens for g in self.groups if g.name == group)

    def object_ids(self, group: str) -> int:
        """Ids that one unit has in a group: its pages, or one slot."""
        return 1 if group in self.state_groups else self.unit_pages(group)

    def unit_ids(self, table: SequenceTable, group: str, unit: int) -> tuple[int, ...]:
        """The table's pages of unit number `unit`."""
        count = self.unit_pages(group)
        return tuple(table.pages[group][unit * count : (unit + 1) * count])

    def trim(self, table: SequenceTable, position: int) -> None:
        """Give back the window pages that no token from `position` on can see.

        Whole units are freed at a time, so that the units of the last window stay complete.
        """
        for g in self.page_groups:
            if g.kind != "window":
                continue
            units = max(0, position - g.window_tokens) // self.unit_tokens
            end = units * self.unit_pages(g.name)
            pages, freed = table.pages[g.name], table.freed[g.name]
            if end > freed:
                self.pools[g.name].release(pages[freed:end])
                pages[freed:end] = [-1] * (end - freed)
                table.freed[g.name] = end

    def release(self, table: SequenceTable) -> None:
        """Give back everything that a table holds."""
        for g in self.groups:
            self.pools[g.name].release(table.held(g.name))
        table.pages, table.freed, table.states = {}, {}, {}

    def condemn(self, table: SequenceTable) -> None:
        """The contents of a table cannot be trusted: clear them before anyone else uses them."""
        for g in self.groups:
            self.pools[g.name].condemn(table.held(g.name))

    def drain(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Ids to zero and ids to poison before the next step, by group."""
        zero, garbage = {}, {}
        for name, pool in self.pools.items():
            to_zero, to_fill = pool.drain()
            if to_zero:
                zero[name] = to_zero
            if to_fill:
                garbage[name] = to_fill
        return zero, garbage

    def check(self, tables: Iterable[SequenceTable], pins: dict[str, list[int]]) -> None:
        """Raise InvariantError where pools and holders disagree; `pins` are held by jobs."""
        held = {g.name: list(pins.get(g.name, ())) for g in self.groups}
        for table in tables:
            for g in self.groups:
                held[g.name] += table.held(g.name)
        for g in self.groups:
            indexed = [i for u in self.index.units() for i in u.ids.get(g.name, ())]
            self.pools[g.name].check(held[g.name], indexed)


def as_pages(ids: Iterable[int]) -> tuple[PageId, ...]:
    """Ids of a paged or window group under their own type."""
    return tuple(PageId(i) for i in ids)


def as_slot(slot: int) -> SlotId:
    """Id of a state group under its own type."""
    return SlotId(slot)
