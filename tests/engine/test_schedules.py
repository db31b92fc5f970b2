"""Random schedules: whatever comes, goes and is preempted, every token is the reference's."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.engine.config import CoreConfig
from services.engine.core import EngineCore
from services.engine.scheduler.messages import Request
from tests.engine.driver import MAX_STEPS, Bench, Log, config, request
from tests.engine.fakes import HalfRightDrafts, MemoryStore
from tests.engine.toy_model import UNIT, VOCAB, reference_greedy


@dataclass
class Schedule:
    """Everything random about one run, from one seed."""

    rng: random.Random

    def settings(self) -> CoreConfig:
        rng = self.rng
        seqs = rng.choice([1, 2, 5, 9])
        speculative = rng.choice([0, 0, 3])
        return config(
            max_model_len=192,
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs * (1 + speculative) + rng.choice([0, 7, 40]),
            num_speculative_tokens=speculative,
            prefix_cache_retention_interval=rng.choice([0, UNIT, 3 * UNIT]),
            num_kv_tokens=rng.choice([192, 240, 600]),
            state_slots=rng.choice([2 + speculative, 8 + speculative, 30]),
            max_loads=rng.choice([1, 3]),
            max_stores=rng.choice([1, 5]),
        )

    def requests(self, count: int) -> list[Request]:
        rng = self.rng
        stems = [[rng.randrange(VOCAB) for _ in range(150)] for _ in range(3)]
        out = []
        for i in range(count):
            stem = rng.choice(stems)[: rng.randrange(1, 130)]
            tail = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 5, 20]))]
            priority = rng.choice([0, 0, 0, -1, 3])
            choices = rng.choice([1, 1, 1, 3])
            tokens = rng.choice([1, 7, 30])
            out.append(request(str(i), stem + tail, tokens, priority=priority, n=choices))
        return out


def play(core: EngineCore, requests: list[Request], rng: random.Random) -> tuple[Log, set[str]]:
    """Submit at random moments, abort some at random moments."""
    log, aborted, queue = Log(), set(), list(requests)
    for _ in range(MAX_STEPS):
        while queue and rng.random() < 0.4:
            core.submit(queue.pop(0))
        if rng.random() < 0.05:
            name = str(rng.randrange(len(requests)))
            if core.abort(name):
                aborted.add(name)
        log.add(core.step())
        if rng.random() < 0.01:
            core.reset_prefix_cache()
        if not queue and not core.has_work:
            return log, aborted
    raise AssertionError("the core does not come to an end")


def verify(log: Log, aborted: set[str], requests: list[Request]) -> None:
    for r in requests:
        room = 192 - len(r.prompt_token_ids)
        expected = reference_greedy(r.prompt_token_ids, min(r.stopping.max_tokens, room))
        for choice in range(r.n):
            tokens = log.choices[(r.request_id, choice)].tokens
            finished = log.finished(r.request_id, choice)
            assert tokens == expected[: len(tokens)], (r.request_id, choice)
            if finished.reason == FinishReason.FINISH_REASON_ABORT:
                assert r.request_id in aborted
            else:
                assert len(tokens) == len(expected)
                assert finished.reason == FinishReason.FINISH_REASON_LENGTH


@pytest.mark.parametrize("seed", range(24))
def test_random_schedule(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    schedule = Schedule(rng)
    settings = schedule.settings()
    drafts = HalfRightDrafts(0.4, seed) if settings.num_speculative_tokens else None
    core = bench.core(settings=settings, drafts=drafts)
    requests = schedule.requests(25)
    log, aborted = play(core, requests, rng)
    verify(log, aborted, requests)


@pytest.mark.parametrize("seed", range(12))
def test_random_schedule_with_a_store_that_restarts_and_fails(bench: Bench, seed: int) -> None:
    rng = random.Random(1000 + seed)
    objects: dict = {}
    for _ in range(2):  # the second core starts empty, the store does not
        schedule = Schedule(random.Random(seed))
        store = MemoryStore(objects, delay=rng.choice([1, 3]))
        store.short_by = rng.choice([0, 0, 1, 3])
        store.refuses = rng.random() < 0.1
        core = bench.core(settings=schedule.settings(), store=store)
        requests = schedule.requests(20)
        log, aborted = play(core, requests, rng)
        verify(log, aborted, requests)
        while core.idle():
            pass
