"""Through the engine core: a hit, a preemption and a restart from the store change no bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from services.engine.cache.external import ExternalStore, UnitHash
from services.engine.cache.sizing import least_unit
from services.engine.core import EngineCore
from services.engine.scheduler.messages import Request, RequestSampling
from tests.engine.driver import Log, config, request, run
from tests.engine.fakes import MemoryStore
from tests.models.deepseek_v4.conftest import Model, prompt

UNIT = 128
Output = list[tuple[int, float]]


@pytest.fixture
def make_core(nano: Model) -> Iterator[Any]:
    made: list[EngineCore] = []

    def make(store: ExternalStore | None = None, **changes: object) -> EngineCore:
        settings = {
            "unit_tokens": UNIT,
            "prefix_cache_retention_interval": UNIT,
            "max_num_batched_tokens": 96,
            "num_kv_tokens": 4096,
        }
        made.append(EngineCore(nano, config(**(settings | changes)), None, store))
        return made[-1]

    yield make
    for core in made:
        while core.idle():
            pass
        core.check_invariants()
        assert not core.has_work
        assert all(g.free + g.cached == g.total for g in core.load().groups)


def output(log: Log, name: str) -> Output:
    outcome = log.choices[(name, 0)]
    scores = [s.logprob for s in outcome.logprobs]
    return list(zip(outcome.tokens, scores, strict=True))


def ask(name: str, ids: list[int], tokens: int = 4) -> Request:
    drawn = RequestSampling(temperature=0.9, top_p=0.95, seed=7)
    return request(name, ids, tokens, sampling=drawn, logprobs=1)


def test_the_unit_is_whole_pages_of_every_group(nano: Model) -> None:
    assert least_unit(nano.groups, 64) == UNIT
    assert {g.name: g.entries_per_page for g in nano.groups} == {
        "window": 64,
        "csa": 32,
        "index": 32,
        "hca": 1,
        "state": 1,
    }


def test_a_prompt_of_300_tokens_sent_twice_reuses_256(make_core: Any) -> None:
    core = make_core()
    ids = prompt(300, seed=51)
    first = output(run(core, ask("a", ids)), "a")
    assert core.load().prefix_hit_tokens == 0
    second = output(run(core, ask("a", ids)), "a")
    assert core.load().prefix_hit_tokens == 256
    assert second == first and len(set(first)) > 2


def test_a_hit_on_a_part_continues_like_a_cold_run(make_core: Any) -> None:
    """Prompts that branch off behind one unit and a bit, and behind two."""
    ids, core = prompt(300, seed=52), make_core()
    branches = {str(n): ids[:n] + prompt(30, seed=n) for n in (131, 256)}
    cold = {n: output(run(make_core(), ask(n, p)), n) for n, p in branches.items()}
    run(core, ask("whole", ids, 1))
    for name, branch in branches.items():
        before = core.load().prefix_hit_tokens
        assert output(run(core, ask(name, branch)), name) == cold[name]
        assert core.load().prefix_hit_tokens - before == int(name) // UNIT * UNIT


def test_company_and_preemption_change_no_bit(make_core: Any) -> None:
    """Four sequences grow into a second page each, where there are six pages."""
    requests = [ask(str(i), prompt(119 + i, seed=60 + i), 12) for i in range(4)]
    plain = make_core(enable_prefix_caching=False)
    alone = {r.request_id: output(run(plain, r), r.request_id) for r in requests}
    tight = make_core(max_num_seqs=4, num_kv_tokens=6 * UNIT)
    log = run(tight, *requests)
    assert tight.load().preemptions > 0
    assert {n: output(log, n) for n in alone} == alone


def test_hits_from_the_store_after_a_restart_change_no_bit(make_core: Any) -> None:
    objects: dict[tuple[UnitHash, str], bytes] = {}
    ids = prompt(300, seed=53)
    outputs = []
    for life in range(2):
        core = make_core(MemoryStore(objects))
        outputs.append(output(run(core, ask("a", ids)), "a"))
        while core.idle():
            pass
        assert core.load().external_hit_tokens == 256 * life
    assert outputs[0] == outputs[1]
