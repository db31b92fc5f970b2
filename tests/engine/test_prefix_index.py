"""What the prefix index finds, and in which order it forgets."""

from __future__ import annotations

from services.common.prefix_chain import UnitHash
from services.engine.cache.pool import IdPool
from services.engine.cache.prefix import Match, PrefixIndex
from tests.engine.toy_model import paged, state, window

ROOT = UnitHash(b"root")


class Shelf:
    """An index over a paged, a window (2 units) and a state group, one id per unit each."""

    def __init__(self, size: int = 8) -> None:
        self.groups = (paged(16), window(), state())
        self.pools = {g.name: IdPool(g.name, size) for g in self.groups}
        self.index = PrefixIndex(self.groups, self.pools, {"win": 2})

    def put(self, path: str, groups: str = "kv") -> None:
        """Index the unit named by `path`, child of the path without its last letter."""
        ids = {}
        for name in groups.split():
            taken = self.pools[name].take(1)
            assert taken is not None
            ids[name] = tuple(taken)
        self.index.add(name_of(path), name_of(path[:-1]), ids)
        for name, group_ids in ids.items():
            self.pools[name].release(group_ids)

    def match(self, path: str) -> Match:
        return self.index.match(prefixes(path))

    def held(self) -> set[str]:
        return {unit.hash.decode() for unit in self.index.units()}


def name_of(path: str) -> UnitHash:
    return UnitHash(path.encode()) if path else ROOT


def prefixes(path: str) -> list[UnitHash]:
    return [name_of(path[: k + 1]) for k in range(len(path))]


def test_a_hit_ends_at_the_last_unit_with_every_snapshot() -> None:
    shelf = Shelf()
    shelf.put("a", "kv win")
    shelf.put("ab", "kv win state")
    shelf.put("abc", "kv win")
    shelf.put("abcd", "kv")
    assert shelf.match("abcd") == Match(units=2, chain=4)
    assert shelf.match("abx") == Match(units=2, chain=2)
    assert shelf.match("a") == Match(units=0, chain=1)
    assert shelf.match("xa") == Match(units=0, chain=0)


def test_a_hit_needs_the_whole_last_window() -> None:
    shelf = Shelf()
    shelf.put("a", "kv win")
    shelf.put("ab", "kv")
    shelf.put("abc", "kv win state")
    assert shelf.match("abc").units == 0
    shelf.put("ab", "win")
    assert shelf.match("abc").units == 3


def test_a_group_that_a_unit_has_is_not_replaced() -> None:
    shelf = Shelf()
    shelf.put("a", "kv state")
    before = shelf.index.get(name_of("a"))
    assert before is not None
    kept = dict(before.ids)
    shelf.put("a", "kv win state")
    assert {n: before.ids[n] for n in kept} == kept and "win" in before.ids
    assert all(p.free + p.cached == p.total for p in shelf.pools.values())
    assert shelf.pools["kv"].cached == 1


def test_a_unit_without_pages_is_not_indexed() -> None:
    shelf = Shelf()
    shelf.put("a", "state")
    assert shelf.match("a").chain == 0
    assert shelf.pools["state"].free == 8


def test_children_go_before_parents_and_old_before_new() -> None:
    shelf = Shelf(size=5)
    for path in ("a", "ab", "abc", "x", "xy"):
        shelf.put(path)
    shelf.index.touch(prefixes("abc"), 0)
    shelf.index.refresh(prefixes("xy"))
    assert shelf.index.make_room("kv", 1)
    assert shelf.held() == {"a", "ab", "x", "xy"}
    assert shelf.index.make_room("kv", 3)
    assert shelf.held() == {"x", "xy"}


def test_units_in_use_outlive_unused_ones() -> None:
    shelf = Shelf(size=3)
    for path in ("a", "b", "c"):
        shelf.put(path)
    unit = shelf.index.get(name_of("a"))
    assert unit is not None
    shelf.pools["kv"].share(unit.ids["kv"])
    assert shelf.index.make_room("kv", 1)
    assert shelf.held() == {"a", "c"}
    assert not shelf.index.make_room("kv", 3)
    shelf.pools["kv"].release(unit.ids.get("kv", (0,)))


def test_an_unused_parent_of_a_used_child_can_be_had() -> None:
    """Two sequences computed the same first unit; the index kept the other one's."""
    shelf = Shelf(size=2)
    shelf.put("a")
    shelf.put("ab")
    child = shelf.index.get(name_of("ab"))
    assert child is not None
    ids = child.ids["kv"]
    shelf.pools["kv"].share(ids)
    assert shelf.pools["kv"].available == 1
    assert shelf.index.make_room("kv", 1)
    shelf.pools["kv"].release(ids)
    assert shelf.pools["kv"].free == 2


def test_short_of_slots_only_snapshots_go() -> None:
    shelf = Shelf(size=3)
    for path in ("a", "ab", "abc"):
        shelf.put(path, "kv win state")
    shelf.index.touch(prefixes("abc"), 3)
    assert shelf.index.make_room("state", 2)
    assert shelf.held() == {"a", "ab", "abc"}
    assert shelf.match("abc").units == 3
    assert shelf.index.make_room("state", 3)
    assert shelf.match("abc") == Match(units=0, chain=3)


def test_dropping_a_kept_snapshot_is_refused() -> None:
    shelf = Shelf()
    shelf.put("a", "kv win state")
    unit = shelf.index.get(name_of("a"))
    assert unit is not None
    unit.kept.add("state")
    shelf.index.drop_snapshot(name_of("a"), "state")
    shelf.index.drop_snapshot(name_of("a"), "win")
    assert set(unit.ids) == {"kv", "state"}


def test_forgetting_takes_everything_that_follows() -> None:
    shelf = Shelf()
    for path in ("a", "ab", "abc", "abd", "x"):
        shelf.put(path, "kv")
    shelf.index.forget([name_of("ab")])
    assert shelf.held() == {"a", "x"}


def test_clearing_spares_units_in_use() -> None:
    shelf = Shelf()
    for path in ("a", "ab", "x"):
        shelf.put(path, "kv win state")
    unit = shelf.index.get(name_of("ab"))
    assert unit is not None
    shelf.pools["kv"].share(unit.ids["kv"])
    shelf.index.clear()
    assert shelf.held() == {"a", "ab"}
    shelf.pools["kv"].release(unit.ids["kv"])
    shelf.index.clear()
    assert shelf.held() == set()
    assert all(p.free == p.total for p in shelf.pools.values())


def test_news_are_the_units_that_a_hit_may_end_with() -> None:
    shelf = Shelf()
    shelf.put("a", "kv win")
    shelf.put("ab", "kv win state")
    assert shelf.index.take_news() == {name_of("ab"): True}
    assert shelf.index.take_news() == {}
    shelf.put("abc", "kv")
    shelf.index.drop_snapshot(name_of("ab"), "state")
    assert shelf.index.take_news() == {name_of("ab"): False}
    shelf.index.clear()
    assert shelf.index.take_news() == {}
