"""The external store beside the pools: a second life of the index, never a wrong or lost token."""

from __future__ import annotations

import pytest

from services.common.prefix_chain import UnitHash
from tests.engine.driver import Bench, Log, config, request, run
from tests.engine.fakes import MemoryStore
from tests.engine.test_core import prompt
from tests.engine.toy_model import ToyModel, paged, reference_greedy

Objects = dict[tuple[UnitHash, str], bytes]


def filled(bench: Bench, *lengths: int, output: int = 20) -> Objects:
    """What a first core stores of prompts of these lengths."""
    objects: Objects = {}
    core = bench.core(store=MemoryStore(objects))
    run(core, *(request(str(n), prompt(n), output) for n in lengths))
    while core.idle():
        pass
    return objects


def test_a_new_core_hits_what_the_last_one_stored(bench: Bench) -> None:
    objects = filled(bench, 100)
    core = bench.core(store=MemoryStore(objects))
    log = run(core, request("a", prompt(100), 20))
    assert log.tokens("a") == reference_greedy(prompt(100), 20)
    assert (log.prompts["a"].cached, log.prompts["a"].external_cached) == (96, 96)
    load = core.load()
    assert load.external_query_tokens == load.external_hit_tokens == 96
    assert load.store_connected


def test_the_next_turn_continues_from_the_store(bench: Bench) -> None:
    objects = filled(bench, 50, output=60)
    turn = prompt(50) + reference_greedy(prompt(50), 60) + prompt(20, seed=3)
    log = run(bench.core(store=MemoryStore(objects)), request("a", turn, 10))
    assert log.prompts["a"].external_cached == 96
    assert log.tokens("a") == reference_greedy(turn, 10)


def test_only_what_the_pools_lack_is_loaded(bench: Bench) -> None:
    objects = filled(bench, 150)
    store = MemoryStore(objects)
    core = bench.core(store=store)
    run(core, request("first", prompt(150)[:50], 5))
    assert not store.loads  # no snapshot of that prefix is stored
    log = run(core, request("second", prompt(150), 5))
    (job,) = store.loads
    assert job.first_unit == 3 and len(job.unit_hashes) == 9
    assert [ids is not None for ids in job.destinations["kv"]] == [True] * 6
    assert [ids is not None for ids in job.destinations["win"]] == [False] * 4 + [True] * 2
    assert [ids is not None for ids in job.destinations["state"]] == [False] * 5 + [True]
    assert log.prompts["second"].cached == 144
    assert log.prompts["second"].external_cached == 96
    assert log.tokens("second") == reference_greedy(prompt(150), 5)


@pytest.mark.parametrize("short_by", [1, 3, 99])
def test_a_short_load_is_completed_by_computing(bench: Bench, short_by: int) -> None:
    objects = filled(bench, 100)
    store = MemoryStore(objects)
    store.short_by = short_by
    core = bench.core(store=store)
    log = run(core, request("a", prompt(100), 20), request("b", prompt(100), 20))
    for name in ("a", "b"):
        assert log.tokens(name) == reference_greedy(prompt(100), 20)
    assert len(store.loads) >= 1
    assert log.prompts["a"].external_cached == 0


def test_a_paged_model_uses_the_units_of_a_short_load(bench: Bench) -> None:
    objects: Objects = {}
    model = ToyModel((paged(),), ngram=False)
    core = bench.core(model, store=MemoryStore(objects))
    run(core, request("a", prompt(100), 5))
    while core.idle():
        pass
    store = MemoryStore(objects)
    store.short_by = 2
    log = run(bench.core(model, store=store), request("a", prompt(100), 5))
    assert log.prompts["a"].external_cached == 64
    assert log.tokens("a") == reference_greedy(prompt(100), 5, (paged(),), ngram=False)


def test_a_silent_store_delays_a_request_only_so_long(bench: Bench) -> None:
    store = MemoryStore(filled(bench, 100))
    store.silent = True
    core = bench.core(settings=config(lookup_timeout_seconds=2.0), store=store)
    core.submit(request("a", prompt(100), 5))
    core.submit(request("b", prompt(3), 5))  # too short for a look-up: not held up
    log = Log()
    for _ in range(10):
        log.add(core.step())
    assert core.blocked and core.has_work
    assert log.finished("b") and ("a", 0) not in log.choices
    bench.clock.now += 2.0
    run(core, log=log)
    assert log.tokens("a") == reference_greedy(prompt(100), 5)


def test_a_disconnected_store_is_not_asked(bench: Bench) -> None:
    store = MemoryStore(filled(bench, 100))
    store.connected = False
    core = bench.core(store=store)
    log = run(core, request("a", prompt(100), 5))
    assert log.prompts["a"].cached == 0
    assert not core.load().store_connected
    assert not core.idle()


def test_a_store_that_lost_everything_is_filled_again(bench: Bench) -> None:
    objects: Objects = {}
    store = MemoryStore(objects)
    core = bench.core(store=store)
    run(core, request("a", prompt(100), 5))
    while core.idle():
        pass
    names = set(objects)
    objects.clear()
    store.connected = False
    core.idle()
    store.connected = True
    core.idle()
    core.reset_prefix_cache()
    run(core, request("b", prompt(100), 5))
    while core.idle():
        pass
    assert set(objects) == names


def test_a_store_that_refuses_units_gets_them_offered_again(bench: Bench) -> None:
    objects: Objects = {}
    store = MemoryStore(objects)
    store.refuses = True
    core = bench.core(store=store)
    run(core, request("a", prompt(40), 5))
    while core.idle():
        pass
    assert not objects
    store.refuses = False
    run(core, request("b", prompt(40) + prompt(30, 1), 5))
    while core.idle():
        pass
    assert {name for _, name in objects} == {"kv", "comp", "win", "state"}


def test_an_abort_during_a_load_keeps_its_pages_until_the_answer(bench: Bench) -> None:
    store = MemoryStore(filled(bench, 100), delay=5)
    core = bench.core(store=store)
    core.submit(request("a", prompt(100), 5))
    while not store.loads:
        core.step()
    core.abort("a")
    core.step()
    core.check_invariants()
    used = {g.name: g.total - g.free - g.cached for g in core.load().groups}
    assert used["kv"] == 24 and used["state"] == 1
    while core.idle():
        pass
    assert all(g.total == g.free + g.cached for g in core.load().groups)
    log = run(core, request("b", prompt(100), 5))
    assert log.prompts["b"].cached == 96  # the load was not in vain


def test_loads_in_flight_are_bounded(bench: Bench) -> None:
    objects = filled(bench, 100, 101, 102, 103, 104)
    store = MemoryStore(objects, delay=4)
    core = bench.core(settings=config(max_loads=2), store=store)
    for n in (100, 101, 102, 103, 104):
        core.submit(request(str(n), prompt(n), 5))
    log = Log()
    for _ in range(6):
        log.add(core.step())
    assert len(store.loads) == 2
    run(core, log=log)
    assert len(store.loads) == 5
    assert [p.external_cached for p in log.prompts.values()] == [96] * 5


def test_outputs_of_a_turn_are_stored_when_it_ends(bench: Bench) -> None:
    objects = filled(bench, 20, output=100)
    states = [h for h, name in objects if name == "state"]
    # End of the prompt, one interval of 64, end of the turn: not one for each of the 7 units.
    assert len(states) == 3
    assert len([h for h, name in objects if name == "kv"]) == 7
