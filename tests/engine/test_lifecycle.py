"""Requests that end early, wait, fail or ask for numbers."""

from __future__ import annotations

import math

import pytest
import torch
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.engine.scheduler.messages import (
    FinishedOut,
    RequestRefused,
    RequestSampling,
    TokensOut,
)
from tests.engine.driver import Bench, Log, config, request, run
from tests.engine.test_core import prompt
from tests.engine.toy_model import ToyModel, reference_greedy, reference_logits


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 12])
def test_abort_ends_a_request_at_once_and_gives_everything_back(bench: Bench, steps: int) -> None:
    core = bench.core(settings=config(enable_prefix_caching=False))
    core.submit(request("a", prompt(150), 50, n=2))
    log = Log()
    for _ in range(steps):
        log.add(core.step())
    assert core.abort("a")
    assert all(g.free == g.total for g in core.load().groups)
    assert core.has_work
    log.add(core.step())
    assert not core.has_work
    for choice in range(2):
        assert log.finished("a", choice).reason == FinishReason.FINISH_REASON_ABORT
    assert not core.abort("a")


def test_an_aborted_leader_lets_nothing_hang(bench: Bench) -> None:
    core = bench.core()
    core.submit(request("a", prompt(100), 5, n=3))
    core.submit(request("b", prompt(100), 5))
    log = Log()
    log.add(core.step())
    core.abort("a")
    run(core, log=log)
    assert log.tokens("b") == reference_greedy(prompt(100), 5)


def test_an_id_can_be_used_again_after_its_request_ended(bench: Bench) -> None:
    core = bench.core()
    core.submit(request("a", prompt(20), 5))
    with pytest.raises(RequestRefused) as refused:
        core.submit(request("a", prompt(20), 5))
    assert refused.value.field == "request_id"
    run(core)
    assert run(core, request("a", prompt(20), 5)).tokens("a") == reference_greedy(prompt(20), 5)


def test_a_better_priority_takes_the_only_seat(bench: Bench) -> None:
    core = bench.core(settings=config(max_num_seqs=1))
    core.submit(request("low", prompt(40), 20, priority=5))
    log = Log()
    for _ in range(3):
        log.add(core.step())
    core.submit(request("high", prompt(30), 5, priority=-1))
    order = []
    while core.has_work:
        events = core.step()
        order += [e.request_id for e in events if isinstance(e, FinishedOut)]
        log.add(events)
    assert order == ["high", "low"]
    assert core.load().preemptions == 1
    assert log.tokens("low") == reference_greedy(prompt(40), 20)


def test_equal_priorities_are_served_in_order(bench: Bench) -> None:
    core = bench.core(settings=config(max_num_seqs=1))
    order = []
    for i in range(4):
        core.submit(request(str(i), prompt(10, i), 3))
    while core.has_work:
        order += [e.request_id for e in core.step() if isinstance(e, FinishedOut)]
    assert order == ["0", "1", "2", "3"]


def test_a_long_prompt_does_not_stop_the_output_of_others(bench: Bench) -> None:
    core = bench.core(settings=config(max_num_batched_tokens=16))
    core.submit(request("short", prompt(5), 30))
    log = Log()
    log.add(core.step())
    core.submit(request("long", prompt(200), 1, priority=-1))
    for _ in range(10):
        events = core.step()
        assert any(isinstance(e, TokensOut) and e.request_id == "short" for e in events)
        log.add(events)
    run(core, log=log)
    assert log.tokens("long") == reference_greedy(prompt(200), 1)


def test_the_queue_is_bounded_in_tokens(bench: Bench) -> None:
    core = bench.core(settings=config(max_waiting_tokens=100, max_num_seqs=1))
    core.submit(request("huge", prompt(300), 1))
    with pytest.raises(RequestRefused) as refused:
        core.submit(request("more", prompt(1), 1))
    assert refused.value.reason == ErrorReason.ERROR_REASON_QUEUE_FULL
    core.step()
    core.submit(request("fits", prompt(100), 1))
    with pytest.raises(RequestRefused):
        core.submit(request("more", prompt(1), 1))
    log = run(core)
    assert set(log.choices) == {("huge", 0), ("fits", 0)}


def test_a_request_that_waits_too_long_fails_with_deadline(bench: Bench) -> None:
    core = bench.core(settings=config(max_num_seqs=1))
    core.submit(request("runs", prompt(20), 30, queue_timeout=1.0))
    log = Log()
    log.add(core.step())
    core.submit(request("waits", prompt(20), 5, queue_timeout=2.0, n=2))
    bench.clock.now += 1.9
    log.add(core.step())
    assert ("waits", 0) not in log.choices
    bench.clock.now += 0.1
    log.add(core.step())
    for choice in range(2):
        finished = log.finished("waits", choice)
        assert finished.error == ErrorReason.ERROR_REASON_DEADLINE
        assert finished.reason == FinishReason.FINISH_REASON_ERROR
    run(core, log=log)
    assert log.tokens("runs") == reference_greedy(prompt(20), 30)


def test_progress_is_reported_while_a_prompt_is_computed(bench: Bench) -> None:
    core = bench.core(settings=config(max_num_batched_tokens=10, progress_seconds=2.0))
    core.submit(request("a", prompt(100), 1))
    log = Log()
    while core.has_work:
        bench.clock.now += 1.0
        log.add(core.step())
    assert [p.prefilled for p in log.progress] == [20, 40, 60, 80]
    assert {p.total for p in log.progress} == {100}


def test_bad_numbers_end_only_their_own_request(bench: Bench) -> None:
    core = bench.core(ToyModel(poison_token=60))
    clean = [t % 60 for t in prompt(100)]
    good = reference_greedy(clean, 8)
    assert 60 not in good
    run(core, request("before", clean, 8))
    bad = [*clean[:70], 60]
    log = run(core, request("bad", bad, 8), request("good", clean, 8))
    assert log.finished("bad").error == ErrorReason.ERROR_REASON_NUMERIC
    assert log.tokens("bad") == []
    assert log.tokens("good") == good
    core.check_invariants()
    again = run(core, request("again", clean, 8))
    assert again.tokens("again") == good
    assert again.prompts["again"].cached < 96  # what the failed request had read is forgotten


def test_bad_numbers_in_mid_prompt_are_seen_before_they_are_cached(bench: Bench) -> None:
    core = bench.core(
        ToyModel(poison_token=60), config(max_num_batched_tokens=32, debug_poison=False)
    )
    tokens = [t % 60 for t in prompt(100)]
    tokens[31] = 60
    log = run(core, request("bad", tokens, 8))
    assert log.finished("bad").error == ErrorReason.ERROR_REASON_NUMERIC
    assert all(g.cached == 0 for g in core.load().groups)


def test_what_a_failed_request_held_is_zeroed(bench: Bench) -> None:
    core = bench.core(ToyModel(poison_token=60), config(debug_poison=False))
    run(core, request("bad", [1, 2, 60], 8))
    core.idle()
    for tensors in core.mover.pools.values():
        for tensor in tensors.values():
            assert not tensor.any()


def test_logprobs_are_the_models_own(bench: Bench) -> None:
    sampling = RequestSampling(temperature=0.0, logit_bias={3: 100.0})
    log = run(bench.core(), request("a", prompt(20), 6, sampling=sampling, logprobs=3))
    outcome = log.choices[("a", 0)]
    assert outcome.tokens == [3] * 6 and len(outcome.logprobs) == 6
    context = prompt(20)
    for entry in outcome.logprobs:
        expected = torch.log_softmax(torch.tensor(reference_logits(context)).double(), -1)
        assert entry.token_id == 3
        assert entry.logprob == pytest.approx(float(expected[3]), abs=1e-5)
        assert [p for _, p in entry.top] == pytest.approx(
            sorted(expected.tolist(), reverse=True)[:3], abs=1e-5
        )
        context = [*context, 3]


def test_listed_tokens_are_scored_in_place_of_the_likely_ones(bench: Bench) -> None:
    listed = (9, 3, 41)
    sampling = RequestSampling(temperature=0.0, logit_bias={3: 100.0})
    asked = request("a", prompt(20), 6, sampling=sampling, logprobs=0, logprob_token_ids=listed)
    outcome = run(bench.core(), asked).choices[("a", 0)]
    context = prompt(20)
    for entry in outcome.logprobs:
        expected = torch.log_softmax(torch.tensor(reference_logits(context)).double(), -1)
        assert tuple(token for token, _ in entry.top) == listed
        assert [p for _, p in entry.top] == pytest.approx(
            [float(expected[token]) for token in listed], abs=1e-5
        )
        context = [*context, 3]
    assert len(outcome.logprobs) == 6


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs_score_every_prompt_token(bench: Bench, max_tokens: int) -> None:
    core = bench.core(settings=config(prompt_logprobs_chunk=7))
    tokens = prompt(40)
    run(core, request("warm", tokens, 2))
    log = run(core, request("a", tokens, max_tokens, prompt_logprobs=2, n=2))
    scores = log.prompts["a"].prompt_logprobs
    assert log.prompts["a"].cached == 0
    assert [s.token_id for s in scores] == tokens[1:]
    for i, entry in enumerate(scores):
        logits = reference_logits(tokens[: i + 1])
        expected = torch.log_softmax(torch.tensor(logits).double(), -1)
        assert entry.logprob == pytest.approx(float(expected[tokens[i + 1]]), abs=1e-5)
        assert entry.rank == 1 + sum(x > logits[tokens[i + 1]] for x in logits)
        assert len(entry.top) == 2
    for choice in range(2):
        assert log.choices[("a", choice)].tokens == reference_greedy(tokens, max_tokens)
        assert log.finished("a", choice).reason == FinishReason.FINISH_REASON_LENGTH


def test_prompt_logprobs_survive_a_preemption(bench: Bench) -> None:
    core = bench.core(settings=config(max_num_seqs=1, prompt_logprobs_chunk=8))
    core.submit(request("a", prompt(60), 2, prompt_logprobs=0, priority=1))
    log = Log()
    for _ in range(3):
        log.add(core.step())
    core.submit(request("b", prompt(10), 2))
    run(core, log=log)
    assert core.load().preemptions == 1
    assert [s.token_id for s in log.prompts["a"].prompt_logprobs] == prompt(60)[1:]


def test_sampled_choices_differ_and_a_seed_repeats_them(bench: Bench) -> None:
    def outputs(name: str, seed: int | None) -> list[list[int]]:
        sampling = RequestSampling(temperature=2.0, seed=seed)
        log = run(bench.core(), request(name, prompt(30), 20, sampling=sampling, n=3))
        return [log.tokens(name, c) for c in range(3)]

    seeded = outputs("a", 7)
    assert len({tuple(t) for t in seeded}) == 3
    assert outputs("b", 7) == seeded
    assert outputs("b", 8) != seeded
    assert outputs("a", None) != outputs("b", None)
    assert outputs("a", None) == outputs("a", None)


def test_sampled_output_does_not_depend_on_the_company(bench: Bench) -> None:
    def made(i: int) -> RequestSampling:
        return RequestSampling(
            temperature=0.5 + i / 16,
            top_k=(0, 5, 20)[i % 3],
            top_p=(1.0, 0.8)[i % 2],
            seed=i,
            presence_penalty=i % 4 / 2,
            repetition_penalty=1.0 + i % 3 / 10,
        )

    requests = [request(str(i), prompt(3 * i + 1), 25, sampling=made(i)) for i in range(16)]
    together = run(bench.core(settings=config(max_num_seqs=5, num_kv_tokens=512)), *requests)
    for r in requests:
        alone = run(bench.core(), r)
        assert alone.tokens(r.request_id) == together.tokens(r.request_id)


def test_counters_add_up(bench: Bench) -> None:
    core = bench.core()
    run(core, request("a", prompt(50), 5), request("b", prompt(20), 7, n=2))
    run(core, request("c", prompt(50), 5))
    load = core.load()
    assert load.prompt_tokens == 120
    assert load.generation_tokens == 24
    assert load.prefix_hit_tokens == 16 + 48
    assert load.kv_usage == 0.0 and load.steps > 5
    assert not load.store_connected


BAD = [
    ("prompt_token_ids", {"prompt": ()}),
    ("prompt_token_ids", {"prompt": (61,)}),
    ("prompt_token_ids", {"prompt": (-1,)}),
    ("prompt_token_ids", {"prompt": (1,) * 512}),
    ("request_id", {"request_id": ""}),
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("stopping.max_tokens", {"max_tokens": 0}),
    ("output.logprobs", {"logprobs": 21}),
    ("output.prompt_logprobs", {"prompt_logprobs": -2}),
    ("cache_salt", {"cache_salt": "a/b"}),
    ("cache_salt", {"cache_salt": "a" * 129}),
    ("queue_timeout", {"queue_timeout": -1.0}),
    ("sampling.temperature", {"sampling": RequestSampling(temperature=2.1)}),
    ("sampling.temperature", {"sampling": RequestSampling(temperature=math.nan)}),
    ("sampling.top_p", {"sampling": RequestSampling(top_p=0.0)}),
    ("sampling.top_k", {"sampling": RequestSampling(top_k=-1)}),
    ("sampling.min_p", {"sampling": RequestSampling(min_p=1.1)}),
    ("sampling.presence_penalty", {"sampling": RequestSampling(presence_penalty=-2.5)}),
    ("sampling.frequency_penalty", {"sampling": RequestSampling(frequency_penalty=2.5)}),
    ("sampling.repetition_penalty", {"sampling": RequestSampling(repetition_penalty=0.0)}),
    ("sampling.repetition_penalty", {"sampling": RequestSampling(repetition_penalty=math.inf)}),
    ("sampling.logit_bias", {"sampling": RequestSampling(logit_bias={61: 1.0})}),
    ("sampling.logit_bias", {"sampling": RequestSampling(logit_bias={1: math.nan})}),
    ("sampling.allowed_token_ids", {"sampling": RequestSampling(allowed_token_ids=(99,))}),
]


@pytest.mark.parametrize(("field", "change"), BAD)
def test_bad_requests_are_refused_with_their_field(
    bench: Bench, field: str, change: dict[str, object]
) -> None:
    core = bench.core()
    settings: dict[str, object] = {"request_id": "a", "prompt": (1, 2), "max_tokens": 3}
    with pytest.raises(RequestRefused) as refused:
        core.submit(request(**(settings | change)))  # type: ignore[arg-type]
    assert refused.value.field == field
    assert refused.value.reason in (
        ErrorReason.ERROR_REASON_INVALID_FIELD,
        ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED,
    )
    assert not core.has_work


def test_tables_are_required_by_a_model_that_reads_one() -> None:
    from services.engine.core import EngineCore

    with pytest.raises(ValueError, match="n-gram table toy"):
        EngineCore(ToyModel(), config())
