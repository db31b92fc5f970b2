"""Through the engine core: a hit, a preemption and a restart from the store change no bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.checkpoint import Checkpoint
from services.engine.cache.external import ExternalStore, UnitHash
from services.engine.checkpoints.local_table import local_tables
from services.engine.core import EngineCore
from services.engine.scheduler.messages import Request, RequestSampling
from tests.engine.driver import Log, config, request, run
from tests.engine.fakes import MemoryStore
from tests.models.deepseek_v41.conftest import load, prompt

UNIT = 64
Output = list[tuple[int, float]]


@pytest.fixture(scope="module")
def model(nano: Path) -> Any:
    return load(nano, quantised_cache=True)


@pytest.fixture
def make_core(model: Any, nano: Path) -> Iterator[Any]:
    made: list[EngineCore] = []
    tables = local_tables(Checkpoint.open(nano))

    def make(store: ExternalStore | None = None, **changes: object) -> EngineCore:
        settings = {
            "unit_tokens": UNIT,
            "prefix_cache_retention_interval": UNIT,
            "max_num_batched_tokens": 96,
            "num_kv_tokens": 4096,
        }
        made.append(EngineCore(model, config(**(settings | changes)), tables, store))
        return made[-1]

    yield make
    for core in made:
        while core.idle():
            pass
        core.check_invariants()
        assert all(g.free + g.cached == g.total for g in core.load().groups)


def output(log: Log, name: str) -> Output:
    outcome = log.choices[(name, 0)]
    return list(zip(outcome.tokens, [s.logprob for s in outcome.logprobs], strict=True))


def ask(name: str, ids: list[int], tokens: int = 4) -> Request:
    drawn = RequestSampling(temperature=0.9, top_p=0.95, seed=7)
    return request(name, ids, tokens, sampling=drawn, logprobs=1)


def test_a_prompt_of_300_tokens_sent_twice_reuses_256(make_core: Any) -> None:
    core, ids = make_core(), prompt(300, seed=51)
    first = output(run(core, ask("a", ids)), "a")
    assert core.load().prefix_hit_tokens == 0
    second = output(run(core, ask("a", ids)), "a")
    assert core.load().prefix_hit_tokens == 256
    assert second == first and len(set(first)) > 2


def test_a_hit_on_a_part_continues_like_a_cold_run(make_core: Any) -> None:
    """A prompt that branches off inside the third unit."""
    ids = prompt(200, seed=52)
    branch, core = ids[:131] + prompt(30, seed=9), make_core()
    cold = output(run(make_core(), ask("b", branch)), "b")
    run(core, ask("whole", ids, 1))
    assert output(run(core, ask("b", branch)), "b") == cold
    assert core.load().prefix_hit_tokens == 128


def test_hits_from_the_store_after_a_restart_change_no_bit(make_core: Any) -> None:
    objects: dict[tuple[UnitHash, str], bytes] = {}
    ids, outputs = prompt(150, seed=53), []
    for life in range(2):
        core = make_core(MemoryStore(objects))
        outputs.append(output(run(core, ask("a", ids)), "a"))
        while core.idle():
            pass
        assert core.load().external_hit_tokens == 128 * life
    assert outputs[0] == outputs[1]
