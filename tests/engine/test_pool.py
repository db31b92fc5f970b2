"""Books of one pool."""

from __future__ import annotations

import random

import pytest

from services.engine.cache.pool import IdPool, InvariantError


def test_take_is_all_or_nothing() -> None:
    pool = IdPool("p", 3)
    assert pool.take(4) is None
    assert pool.free == 3
    ids = pool.take(3)
    assert ids is not None and sorted(ids) == [0, 1, 2]
    assert pool.take(1) is None and pool.take(0) == []
    pool.release(ids)
    pool.check([], [])


def test_a_shared_id_is_free_when_the_last_holder_gives_it_back() -> None:
    pool = IdPool("p", 2)
    (i,) = pool.take(1) or []
    pool.share([i])
    pool.release([i])
    assert pool.used == 1 and pool.free == 1
    pool.release([i])
    assert pool.used == 0 and pool.free == 2


def test_an_indexed_id_stays_cached_without_holders() -> None:
    pool = IdPool("p", 2)
    (i,) = pool.take(1) or []
    pool.index([i])
    assert pool.is_shared(i)
    pool.release([i])
    assert (pool.free, pool.cached, pool.used, pool.available) == (1, 1, 0, 2)
    pool.share([i])
    assert (pool.cached, pool.used) == (0, 1)
    pool.release([i])
    pool.unindex([i])
    assert pool.free == 2
    pool.check([], [])


def test_condemned_ids_are_zeroed_once() -> None:
    pool = IdPool("p", 3)
    ids = pool.take(2) or []
    pool.condemn(ids[:1])
    pool.release(ids)
    assert pool.drain() == ((ids[0],), ())
    assert pool.drain() == ((), ())


def test_poisoning_lists_every_freed_id() -> None:
    pool = IdPool("p", 3, poison=True)
    ids = pool.take(2) or []
    pool.release(ids)
    assert pool.drain() == ((), tuple(sorted(ids)))


def test_an_id_that_is_written_before_the_next_step_is_not_cleared() -> None:
    pool = IdPool("p", 1)
    ids = pool.take(1) or []
    pool.condemn(ids)
    pool.release(ids)
    assert pool.take(1) == ids
    pool.keep_contents(ids)
    assert pool.drain() == ((), ())


@pytest.mark.parametrize("verb", ["release", "share", "index", "unindex"])
def test_verbs_on_a_free_id_are_refused(verb: str) -> None:
    with pytest.raises(InvariantError):
        getattr(IdPool("p", 1), verb)([0])


def test_check_sees_a_leak_and_a_double_count() -> None:
    pool = IdPool("p", 4)
    ids = pool.take(2) or []
    pool.check(ids, [])
    with pytest.raises(InvariantError, match="reference counts"):
        pool.check(ids[:1], [])
    with pytest.raises(InvariantError, match="reference counts"):
        pool.check([*ids, ids[0]], [])
    with pytest.raises(InvariantError, match="differ"):
        pool.check(ids, [ids[0]])
    pool.index(ids[:1])
    with pytest.raises(InvariantError, match="two places"):
        pool.check(ids, [ids[0], ids[0]])


def test_random_use_keeps_the_books() -> None:
    rng = random.Random(3)
    pool = IdPool("p", 20, poison=True)
    held: list[int] = []
    indexed: set[int] = set()
    for _ in range(2000):
        action = rng.randrange(5)
        if action == 0:
            held += pool.take(rng.randrange(4)) or []
        elif action == 1 and held:
            pool.release([held.pop(rng.randrange(len(held)))])
        elif action == 2 and held:
            i = rng.choice(held)
            pool.share([i])
            held.append(i)
        elif action == 3 and set(held) - indexed:
            i = rng.choice(sorted(set(held) - indexed))
            pool.index([i])
            indexed.add(i)
        elif action == 4 and indexed:
            i = rng.choice(sorted(indexed))
            pool.unindex([i])
            indexed.discard(i)
        pool.check(held, sorted(indexed))
