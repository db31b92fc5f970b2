"""The real models, tiny: a request's tokens and scores are the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.common.checkpoint import Checkpoint
from services.common.prefix_chain import UnitHash
from services.engine.cache.external import ExternalStore
from services.engine.checkpoints.local_table import local_tables
from services.engine.config import CoreConfig
from services.engine.core import EngineCore
from services.engine.models.base import StageModel
from services.engine.models.registry import load_model
from services.engine.runtime.tables_api import TableSource
from services.engine.scheduler.messages import Request, RequestSampling
from tests.engine.driver import Log, config, request, run
from tests.engine.fakes import MemoryStore
from tests.models.tiny import Family, prompt, save_tiny

REQUESTS = 32
Output = list[tuple[int, float]]


class Engine:
    """One loaded checkpoint and the output of every request when it runs alone."""

    def __init__(self, folder: Path, family: Family) -> None:
        save_tiny(folder, family, "fp8" if family == "qwen4_exp" else "bf16")
        self.model: StageModel = load_model(
            folder, device=torch.device("cpu"), compute_dtype=torch.float32
        )
        self.tables: TableSource | None = None
        if self.model.ngrams:
            self.tables = local_tables(Checkpoint.open(folder))
        self.requests = [self._request(i) for i in range(REQUESTS)]
        plain = self.core(enable_prefix_caching=False)
        self.alone = {r.request_id: output(run(plain, r), r.request_id) for r in self.requests}

    def core(self, *, store: ExternalStore | None = None, **changes: object) -> EngineCore:
        settings: CoreConfig = config(
            **{"unit_tokens": 64, "prefix_cache_retention_interval": 128} | changes
        )
        return EngineCore(self.model, settings, self.tables, store)

    def check(self, log: Log) -> None:
        for name, expected in self.alone.items():
            assert output(log, name) == expected, name

    @staticmethod
    def _request(i: int) -> Request:
        """Odd lengths, three shared beginnings, greedy and sampled."""
        shared = prompt(140, seed=i % 3)[: (37 * i) % 140]
        own = prompt(5 + i, seed=100 + i)
        greedy = RequestSampling(temperature=0.0, repetition_penalty=1.1)
        drawn = RequestSampling(temperature=0.9, top_p=0.95, top_k=20 * (i % 4), seed=i)
        return request(
            str(i),
            shared + own,
            4 + i % 9,
            sampling=drawn if i % 2 else greedy,
            logprobs=1,
            priority=i % 2,
        )


def output(log: Log, name: str) -> Output:
    outcome = log.choices[(name, 0)]
    scores = [s.logprob for s in outcome.logprobs]
    return list(zip(outcome.tokens, scores, strict=True))


@pytest.fixture(scope="module", params=["qwen4_exp", "qwen3_5"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def cores() -> Iterator[list[EngineCore]]:
    """Cores to check at the end: idle, nothing held."""
    made: list[EngineCore] = []
    yield made
    for core in made:
        assert not core.has_work
        while core.idle():
            pass
        assert all(g.free + g.cached == g.total for g in core.load().groups)


def test_outputs_are_worth_comparing(engine: Engine) -> None:
    streams = {tuple(t for t, _ in out) for out in engine.alone.values()}
    assert len(streams) > REQUESTS // 2
    assert sum(len(set(s)) > 2 for s in streams) > REQUESTS // 2


def test_thirty_two_at_once_equal_each_alone(engine: Engine, cores: list[EngineCore]) -> None:
    core = engine.core(max_num_seqs=32, max_num_batched_tokens=96, num_kv_tokens=8192)
    cores.append(core)
    engine.check(run(core, *engine.requests))
    assert core.load().prefix_hit_tokens > 0


def test_preemption_changes_no_bit(engine: Engine, cores: list[EngineCore]) -> None:
    core = engine.core(
        max_num_seqs=8,
        max_model_len=256,
        max_num_batched_tokens=50,
        num_kv_tokens=384,
        state_slots=9,
    )
    cores.append(core)
    log = Log()
    for r in engine.requests:  # better priorities keep coming in
        core.submit(r)
        for _ in range(2):
            log.add(core.step())
    engine.check(run(core, log=log))
    assert core.load().preemptions > 3


def test_hits_change_no_bit(engine: Engine, cores: list[EngineCore]) -> None:
    core = engine.core(num_kv_tokens=16384, state_slots=100)
    cores.append(core)
    engine.check(run(core, *engine.requests))
    cold = core.load().prefix_hit_tokens
    engine.check(run(core, *engine.requests))
    hits = core.load().prefix_hit_tokens - cold
    assert hits == sum((len(r.prompt_token_ids) - 1) // 64 * 64 for r in engine.requests)


def test_hits_from_the_store_after_a_restart_change_no_bit(
    engine: Engine, cores: list[EngineCore]
) -> None:
    objects: dict[tuple[UnitHash, str], bytes] = {}
    for life in range(2):
        core = engine.core(store=MemoryStore(objects), num_kv_tokens=16384, state_slots=100)
        cores.append(core)
        engine.check(run(core, *engine.requests))
        while core.idle():
            pass
        assert (core.load().external_hit_tokens > 500) == (life == 1)
