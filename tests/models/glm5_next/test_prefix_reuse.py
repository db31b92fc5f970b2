"""Through the engine core: hits, shared pages, bad numbers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from warhorse.v1.common_pb2 import ErrorReason

from services.engine.cache.external import ExternalStore, UnitHash
from services.engine.core import EngineCore
from services.engine.scheduler.messages import Request, RequestSampling
from tests.engine.driver import Log, config, request, run
from tests.engine.fakes import MemoryStore
from tests.models.glm5_next.conftest import GetNano, Model, load, prompt

UNIT, PAGE, POOL, CHUNK = 64, 16, 4, 100
BAD_TOKEN = 490  # its embedding is NaN in the patched weights
Output = list[tuple[int, float]]


def make_core(model: Model, store: ExternalStore | None = None, **changes: object) -> EngineCore:
    settings = {
        "unit_tokens": UNIT,
        "prefix_cache_retention_interval": UNIT,
        "max_num_batched_tokens": CHUNK,
        "num_kv_tokens": 4096,
    }
    return EngineCore(model, config(**(settings | changes)), None, store)


@pytest.fixture
def cores(nano: Model) -> Iterator[Any]:
    made: list[EngineCore] = []

    def make(store: ExternalStore | None = None, model: Model = nano, **changes: object) -> Any:
        made.append(make_core(model, store, **changes))
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
    return list(zip(outcome.tokens, [s.logprob for s in outcome.logprobs], strict=True))


def ask(name: str, ids: list[int], tokens: int = 4) -> Request:
    drawn = RequestSampling(temperature=0.9, top_p=0.95, seed=7)
    return request(name, ids, tokens, sampling=drawn, logprobs=1)


# Two units; a page and a pool that end within one; a chunk of a prefill; none of these at 129.
BOUNDARIES = {"unit": 2 * UNIT, "page": UNIT + 2 * PAGE, "pool": UNIT + POOL, "chunk": CHUNK}


@pytest.mark.parametrize("kind", BOUNDARIES)
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_a_warm_prompt_continues_as_a_cold_one(cores: Any, kind: str, offset: int) -> None:
    ids = prompt(BOUNDARIES[kind] + offset, seed=51)
    cold = output(run(cores(enable_prefix_caching=False), ask("a", ids)), "a")
    core = cores()
    run(core, ask("longer", prompt(200, seed=51)))
    assert output(run(core, ask("warm", ids)), "warm") == cold
    assert output(run(core, ask("again", ids)), "again") == cold
    assert len(set(cold)) > 1


def test_the_last_token_of_a_cached_prompt_is_computed_again_and_applied_once(
    cores: Any,
) -> None:
    """All 128 tokens are cached, state included: the hit ends a unit earlier."""
    ids = prompt(2 * UNIT, seed=52)
    core = cores()
    run(core, ask("longer", ids + prompt(20, seed=1)))
    log = run(core, ask("warm", ids))
    assert log.prompts["warm"].cached == UNIT
    assert output(log, "warm") == output(run(cores(), ask("cold", ids)), "cold")


def test_hits_lie_on_units_with_a_snapshot_alone(cores: Any) -> None:
    ids = prompt(5 * UNIT, seed=53)
    core = cores(prefix_cache_retention_interval=2 * UNIT)
    run(core, ask("first", ids))
    for length, cached in ((2 * UNIT + 30, 2 * UNIT), (3 * UNIT + 30, 2 * UNIT), (5 * UNIT, None)):
        log = run(core, ask(str(length), ids[:length]))
        assert log.prompts[str(length)].cached % UNIT == 0
        if cached is not None:
            assert log.prompts[str(length)].cached == cached


def test_requests_that_share_half_a_page_never_see_each_others_rows(cores: Any) -> None:
    """They branch in the middle of a page, of a pool and of an index page, and run together."""
    stem = prompt(UNIT + PAGE // 2 + 2, seed=54)
    branches = [ask(str(i), stem + prompt(20 + i, seed=70 + i), 12) for i in range(3)]
    alone = [output(run(cores(), branch), branch.request_id) for branch in branches]
    core = cores()
    run(core, ask("stem", stem))
    log = run(core, *branches)
    assert [output(log, branch.request_id) for branch in branches] == alone
    assert all(log.prompts[branch.request_id].cached == UNIT for branch in branches)


def test_company_and_preemption_change_no_bit(cores: Any) -> None:
    requests = [ask(str(i), prompt(55 + i, seed=60 + i), 14) for i in range(4)]
    plain = cores(enable_prefix_caching=False)
    alone = {r.request_id: output(run(plain, r), r.request_id) for r in requests}
    tight = cores(max_num_seqs=4, num_kv_tokens=4 * UNIT + 64, max_model_len=256)
    log = run(tight, *requests)
    assert tight.load().preemptions > 0
    assert {n: output(log, n) for n in alone} == alone


def test_hits_from_the_store_after_a_restart_change_no_bit(cores: Any) -> None:
    objects: dict[tuple[UnitHash, str], bytes] = {}
    ids = prompt(200, seed=55)
    outputs = []
    for life in range(2):
        core = cores(MemoryStore(objects))
        outputs.append(output(run(core, ask("a", ids)), "a"))
        while core.idle():
            pass
        assert core.load().external_hit_tokens == 3 * UNIT * life
    assert outputs[0] == outputs[1]


@pytest.fixture(scope="module")
def poisoned(get_nano: GetNano, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One token of the vocabulary embeds to NaN."""
    folder = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(get_nano("fp8"), folder, dirs_exist_ok=True)
    path = Path(folder) / "model-00001-of-00001.safetensors"
    tensors = load_file(path)
    tensors["model.language_model.embed_tokens.weight"][BAD_TOKEN] = float("nan")
    save_file(tensors, path)
    return load(folder)


def test_bad_numbers_end_their_own_request_alone(cores: Any, poisoned: Model) -> None:
    good, bad = prompt(90, seed=56), [*prompt(70, seed=57), BAD_TOKEN, *prompt(5, seed=58)]
    expected = output(run(cores(model=poisoned), ask("good", good)), "good")
    core = cores(model=poisoned)
    log = run(core, ask("bad", bad), ask("good", good))
    assert log.finished("bad").error == ErrorReason.ERROR_REASON_NUMERIC
    assert log.tokens("bad") == []
    assert output(log, "good") == expected


def test_slots_and_pages_that_held_bad_numbers_are_zeroed(cores: Any, poisoned: Model) -> None:
    core = cores(model=poisoned, debug_poison=False)
    run(core, ask("bad", [*prompt(70, seed=57), BAD_TOKEN]))
    core.idle()
    for group, tensors in core.mover.pools.items():
        for name, tensor in tensors.items():
            assert not tensor.any(), (group, name)
    good = prompt(90, seed=56)
    expected = output(run(cores(model=poisoned), ask("good", good)), "good")
    assert output(run(core, ask("good", good)), "good") == expected
    assert not any(
        bool(torch.isnan(t).any()) for ts in core.mover.pools.values() for t in ts.values()
    )
