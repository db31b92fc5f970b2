"""Reports against other servers, replayed on tiny hybrid models: drafts, a store, a failing store.

Sources: https://github.com/LMCache/LMCache/issues/4984 (garbage after several retrievals with
drafts), https://github.com/LMCache/LMCache/issues/2294, /651 and /3206 (files that cannot be read
after a hit, a store that dies during a retrieval, one that comes back),
https://github.com/vllm-project/vllm/issues/42513 (other tokens with drafts than without).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from services.common.checkpoint import Checkpoint
from services.common.prefix_chain import UnitHash
from services.engine.cache.external import LoadDone, LoadJob, StoreEvent
from services.engine.checkpoints.local_table import local_tables
from services.engine.core import EngineCore
from services.engine.models.registry import load_model
from services.engine.scheduler.messages import Request
from services.engine.scheduler.plan import SequenceId
from tests.engine.driver import Log, config, request, run
from tests.engine.fakes import MemoryStore
from tests.models.tiny import prompt, save_tiny

UNIT = 64
DRAFTS = 3
VOCAB = 500
CHUNKS = request("a", prompt(5 * UNIT + 9, seed=1), 12)
Objects = dict[tuple[UnitHash, str], bytes]


class RecordedDrafts:
    """Proposes what followed in an earlier run, with each token wrong at a given rate."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong: float) -> None:
        self._texts = [tuple(text) for text in texts]
        self._wrong = wrong
        self._rng = random.Random(3)

    def propose(self, sequence: SequenceId, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        known = tuple(tokens)
        (text, *_) = [t for t in self._texts if t[: len(known)] == known]
        following = text[len(known) : len(known) + limit]
        return tuple(
            self._rng.randrange(VOCAB) if self._rng.random() < self._wrong else t for t in following
        )


class Engine:
    """A tiny model with delta rules, and cores on it that start empty."""

    def __init__(self, folder: Path, family: str) -> None:
        save_tiny(folder, family, "fp8" if family == "qwen4_exp" else "bf16")
        device = torch.device("cpu")
        self.model = load_model(folder, device=device, compute_dtype=torch.float32)
        tables = self.model.ngrams
        self.tables = local_tables(Checkpoint.open(folder)) if tables else None
        self.objects: Objects = {}
        cold = self.core(store=MemoryStore(self.objects))
        self.answer = run(cold, CHUNKS).tokens("a")
        while cold.idle():
            pass

    def core(
        self, drafts: RecordedDrafts | None = None, store: MemoryStore | None = None
    ) -> EngineCore:
        settings = config(
            unit_tokens=UNIT,
            prefix_cache_retention_interval=UNIT,
            max_num_seqs=10,
            max_num_batched_tokens=10 * (1 + DRAFTS),
            num_speculative_tokens=DRAFTS if drafts else 0,
            max_loads=1,
        )
        return EngineCore(self.model, settings, self.tables, store, drafts=drafts)


@pytest.fixture(scope="module", params=["qwen4_exp", "qwen3_5"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp(request.param), request.param)


def whole(log: Log, asked: Request) -> list[int]:
    """Prompt and answer."""
    return [*asked.prompt_token_ids, *log.tokens(asked.request_id)]


def test_drafts_change_no_token_of_twenty_prompts(engine: Engine) -> None:
    asked = [request(str(n), prompt(3 + 2 * n, seed=n), 8) for n in range(20)]
    plain = run(engine.core(), *asked)
    core = engine.core(RecordedDrafts([whole(plain, r) for r in asked], wrong=0.3))
    drafted = run(core, *asked)
    for one in asked:
        assert drafted.tokens(one.request_id) == plain.tokens(one.request_id)
    load = core.load()
    assert 0 < load.accepted_draft_tokens < load.draft_tokens


class FailingStore(MemoryStore):
    """Says hit; then it has nothing any more (`unreadable`), or is gone (`dies`)."""

    unreadable = False
    dies = False

    def load(self, job: LoadJob) -> None:
        if self.unreadable:
            self.short_by = len(job.unit_hashes) - job.first_unit
        super().load(job)
        self.connected = not self.dies

    def poll(self) -> list[StoreEvent]:
        if self.connected:
            return super().poll()
        lost = [item for _, item in self._due if isinstance(item, LoadJob)]
        self._due = []
        return [LoadDone(job.job, job.first_unit) for job in lost]


@pytest.mark.parametrize("drafted", [False, True])
def test_a_prompt_from_the_store_gives_the_same_answer(engine: Engine, drafted: bool) -> None:
    text = [*CHUNKS.prompt_token_ids, *engine.answer]
    core = engine.core(
        RecordedDrafts([text], 0.3) if drafted else None, MemoryStore(dict(engine.objects))
    )
    log = Log()
    # Two retrievals: the second one brings what lies behind the first one's units.
    run(core, request("head", CHUNKS.prompt_token_ids[: 2 * UNIT + 1], 1), log=log)
    run(core, CHUNKS, log=log)
    assert log.tokens("a") == engine.answer
    assert (log.prompts["head"].external_cached, log.prompts["a"].cached) == (2 * UNIT, 5 * UNIT)
    assert log.prompts["a"].external_cached == 3 * UNIT


@pytest.mark.parametrize("fault", ["unreadable", "dies"])
def test_a_store_that_fails_after_a_hit_costs_time_alone(engine: Engine, fault: str) -> None:
    store = FailingStore(dict(engine.objects))
    setattr(store, fault, True)
    core = engine.core(store=store)
    log = run(core, CHUNKS)
    assert store.loads and log.tokens("a") == engine.answer
    assert log.prompts["a"].external_cached == core.load().external_hit_tokens == 0
    assert core.load().store_connected == (fault == "unreadable")
    # Back again, it is used again by the same core.
    store.unreadable = store.dies = False
    store.short_by, store.connected = 0, True
    core.reset_prefix_cache()
    again = run(core, CHUNKS)
    assert again.tokens("a") == engine.answer
    assert again.prompts["a"].external_cached == 5 * UNIT and core.load().store_connected
