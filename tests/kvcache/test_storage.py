"""What this service relies on in LMCache, and the rule of a hit against LMCache's own."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from services.common.prefix_hits import Group, GroupKind, longest_hit
from services.kvcache.storage import ArenaStorage, ObjectKey, Slot, StorageConfig, object_key
from tests.kvcache.client import unit_chain

ARENA = 1 << 20


@dataclass
class Bench:
    """A storage over an ordinary array, and the keys that left it."""

    arena: npt.NDArray[np.uint8]
    storage: ArenaStorage
    removed: list[ObjectKey] = field(default_factory=list)

    def put(self, key: ObjectKey, nbytes: int, byte: int = 1) -> None:
        (slot,) = self.storage.reserve([key], nbytes).values()
        assert slot is not None
        self.arena[slot.offset : slot.offset + nbytes] = byte
        assert self.storage.commit([key]) == [key]


def make_bench(config: StorageConfig) -> Bench:
    arena = np.zeros(ARENA, np.uint8)
    removed: list[ObjectKey] = []
    storage = ArenaStorage(arena, config, removed.extend)
    return Bench(arena, storage, removed)


@pytest.fixture(scope="module")
def shared() -> Iterator[Bench]:
    made = make_bench(StorageConfig(eviction_trigger_watermark=1.0))
    yield made
    made.storage.close()


@pytest.fixture
def bench(shared: Bench) -> Iterator[Bench]:
    """An empty storage. What a test leaves must be removable, and the books must add up."""
    shared.removed.clear()
    yield shared
    shared.storage.check()
    assert shared.storage.remove(list(shared.storage._sizes)) == []
    assert shared.storage.usage() == (0, ARENA)


def keys_of(count: int, salt: bytes = b"", group: int = 0) -> list[ObjectKey]:
    return [object_key("model", group, h) for h in unit_chain(count, salt)]


def test_slots_lie_in_the_arena_aligned_and_apart(bench: Bench) -> None:
    slots = bench.storage.reserve(keys_of(20), 5000)
    found = sorted((s.offset, s.nbytes) for s in slots.values() if s is not None)
    assert len(found) == 20
    for (offset, nbytes), (following, _) in itertools.pairwise(found):
        assert offset % 4096 == 0 and nbytes == 5000 and offset + nbytes <= following
    assert found[-1][0] + 5000 <= ARENA
    bench.storage.commit(list(slots))


def test_a_slot_is_the_same_memory_for_writer_and_reader(bench: Bench) -> None:
    (key,) = keys_of(1)
    bench.put(key, 3000, byte=77)
    slot = bench.storage.pin([key])[key]
    assert bytes(bench.storage.bytes_of(slot)) == bytes([77]) * 3000
    bench.storage.unpin([key])


def test_staged_objects_can_be_neither_pinned_nor_removed(bench: Bench) -> None:
    keys = keys_of(2)
    bench.storage.reserve(keys, 100)
    assert bench.storage.pin(keys) == {}
    assert bench.storage.remove(keys) == keys
    bench.storage.commit(keys)
    assert set(bench.storage.pin(keys)) == set(keys)
    bench.storage.unpin(keys)


def test_aborting_frees_the_slot_and_the_key(bench: Bench) -> None:
    keys = keys_of(3)
    bench.storage.reserve(keys, 4096)
    bench.storage.abort(keys)
    assert bench.storage.usage()[0] == 0
    with pytest.raises(RuntimeError, match="1 staged objects"):
        bench.storage.abort(keys[:1])
    bench.put(keys[0], 4096)


def test_a_key_in_the_store_or_on_its_way_gets_no_second_slot(bench: Bench) -> None:
    stored, staged = keys_of(2)
    bench.put(stored, 100)
    bench.storage.reserve([staged], 100)
    assert bench.storage.reserve([stored, staged], 100) == {}
    bench.storage.abort([staged])


def test_pins_count_and_the_last_one_makes_removal_possible(bench: Bench) -> None:
    (key,) = keys_of(1)
    bench.put(key, 100)
    bench.storage.pin([key])
    bench.storage.pin([key])
    assert bench.storage.remove([key]) == [key]
    bench.storage.unpin([key])
    assert bench.storage.remove([key]) == [key]
    bench.storage.unpin([key])
    assert bench.storage.remove([key]) == []
    assert bench.removed == [key]
    with pytest.raises(RuntimeError, match="1 pinned objects"):
        bench.storage.unpin([key])


def test_a_full_arena_evicts_the_least_recent_first_and_only_as_much_as_needed(
    bench: Bench,
) -> None:
    keys = keys_of(16)
    for key in keys:
        bench.put(key, ARENA // 16)
    bench.storage.touch(keys[:4])
    bench.storage.pin(keys[4:5])
    new = keys_of(2, b"new")
    slots = bench.storage.reserve(new, ARENA // 16)
    assert all(isinstance(s, Slot) for s in slots.values())
    assert bench.removed == keys[5:7]
    bench.storage.commit(new)
    bench.storage.unpin(keys[4:5])


def test_what_finds_no_room_is_told_key_by_key(bench: Bench) -> None:
    keys = keys_of(20)
    slots = bench.storage.reserve(keys, ARENA // 16)
    assert [slots[k] is not None for k in keys] == [True] * 16 + [False] * 4
    bench.storage.commit(keys[:16])


def test_objects_of_many_sizes_leave_the_books_in_order(bench: Bench) -> None:
    chance = random.Random(3)
    live: dict[ObjectKey, int] = {}
    for i, key in enumerate(keys_of(600)):
        size = chance.choice((100, 5000, 30_000, 70_000))
        (slot,) = bench.storage.reserve([key], size).values()
        assert slot is not None
        bench.arena[slot.offset : slot.offset + size] = i % 251
        bench.storage.commit([key])
        live[key] = i % 251
        for gone in bench.removed:
            live.pop(gone, None)
        bench.removed.clear()
    bench.storage.check()
    pinned = bench.storage.pin(list(live))
    assert set(pinned) == set(live)
    for key, slot in pinned.items():
        assert set(bytes(bench.storage.bytes_of(slot))) == {live[key]}
    bench.storage.unpin(list(live))


def test_the_background_evicts_above_the_watermark_and_tells() -> None:
    bench = make_bench(StorageConfig(eviction_trigger_watermark=0.5, eviction_ratio=0.5))
    keys = keys_of(12)
    for key in keys:
        bench.put(key, ARENA // 16)
    deadline = time.monotonic() + 5
    while len(bench.removed) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert bench.removed[:6] == keys[:6]
    bench.storage.close()


def test_a_policy_that_evicts_nothing_leaves_the_arena_full() -> None:
    bench = make_bench(StorageConfig(eviction_policy="noop"))
    keys = keys_of(17)
    for key in keys[:16]:
        bench.put(key, ARENA // 16)
    assert bench.storage.reserve(keys[16:], ARENA // 16) == {keys[16]: None}
    bench.storage.close()


@pytest.mark.parametrize(
    "bad",
    [{"align_bytes": 100}, {"align_bytes": 5000}, {"eviction_ratio": 0.0}],
    ids=["small", "odd", "ratio"],
)
def test_impossible_settings_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        StorageConfig(**bad)


def lmcache_hit(windows: Sequence[int], present: Sequence[Sequence[bool]], units: int) -> int:
    """The same question to LMCache's native fold."""
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.bitmap_ops import fold, highest_set_bit

    found = Bitmap(units * len(windows))
    for unit in range(units):
        for group in range(len(windows)):
            if present[group][unit]:
                found.set(unit * len(windows) + group)
    return int(highest_set_bit(fold(found, units, 1, list(windows)))) + 1


def test_the_longest_hit_is_the_one_of_lmcache_s_fold() -> None:
    chance = random.Random(5)
    kinds: tuple[tuple[GroupKind, int, int], ...] = (
        ("paged", 0, -1),
        ("window", 1, 1),
        ("window", 3, 3),
        ("state", 0, 1),
    )
    hits = set()
    for _ in range(2000):
        chosen = [chance.choice(kinds) for _ in range(chance.randint(1, 4))]
        units = chance.randint(1, 9)
        likely = chance.choice((0.5, 0.9, 1.0))
        present = [[chance.random() < likely for _ in range(units)] for _ in chosen]
        groups = [Group(i, "g", kind, window, 1) for i, (kind, window, _) in enumerate(chosen)]
        hit = longest_hit(groups, units, lambda g, u, p=present: p[g.group_id][u])  # type: ignore[misc]
        assert hit == lmcache_hit([w for _, _, w in chosen], present, units)
        hits.add(hit)
    assert hits == set(range(10))
