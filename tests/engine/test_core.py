"""The core on the toy model: outputs equal the reference whatever the schedule."""

from __future__ import annotations

import random

import pytest
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.engine.cache.spec import CacheGroup
from services.engine.scheduler.messages import RequestStopping
from tests.engine.driver import Bench, Log, config, request, run
from tests.engine.toy_model import (
    UNIT,
    VOCAB,
    ToyModel,
    paged,
    reference_greedy,
    state,
    strided,
    window,
)

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 7919 + length)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_output_equals_the_reference(bench: Bench, length: int) -> None:
    log = run(bench.core(), request("a", prompt(length), 40))
    assert log.tokens("a") == reference_greedy(prompt(length), 40)
    assert log.finished("a").reason == FinishReason.FINISH_REASON_LENGTH
    assert log.prompts["a"].cached == 0


@pytest.mark.parametrize(
    "groups",
    [
        (paged(),),
        (paged(1),),
        (paged(16), strided(4), state()),
        (paged(8), window(4)),
        (paged(2), window(16), state()),
    ],
    ids=lambda groups: "+".join(f"{g.name}{g.page_tokens}" for g in groups),
)
def test_any_set_of_groups_is_served_and_hit(bench: Bench, groups: tuple[CacheGroup, ...]) -> None:
    core = bench.core(ToyModel(groups, ngram=False))
    expected = reference_greedy(prompt(70), 50, groups, ngram=False)
    cold = run(core, request("cold", prompt(70), 50))
    warm = run(core, request("warm", prompt(70), 50))
    assert cold.tokens("cold") == warm.tokens("warm") == expected
    assert warm.prompts["warm"].cached == 64


@pytest.mark.parametrize("budget", [8, 9, 17, 64, 1000])
def test_chunks_of_any_size_give_the_same_output(bench: Bench, budget: int) -> None:
    core = bench.core(settings=config(max_num_batched_tokens=budget))
    requests = [request(str(n), prompt(n), 20) for n in LENGTHS]
    log = run(core, *requests)
    for n in LENGTHS:
        assert log.tokens(str(n)) == reference_greedy(prompt(n), 20)


def test_many_requests_at_once_equal_each_alone(bench: Bench) -> None:
    lengths = [1 + 5 * i for i in range(32)]
    core = bench.core(settings=config(max_num_seqs=32, num_kv_tokens=8192))
    log = run(core, *(request(str(n), prompt(n), 10 + n % 23) for n in lengths))
    for n in lengths:
        assert log.tokens(str(n)) == reference_greedy(prompt(n), 10 + n % 23)


def test_forced_preemption_changes_no_token(bench: Bench) -> None:
    settings = config(max_model_len=160, num_kv_tokens=240, max_num_seqs=8, state_slots=10)
    core = bench.core(settings=settings)
    lengths = [40 + 3 * i for i in range(12)]
    log = run(core, *(request(str(n), prompt(n), 60) for n in lengths))
    assert core.load().preemptions > 0
    for n in lengths:
        assert log.tokens(str(n)) == reference_greedy(prompt(n), 60)


def test_smallest_pools_serve_one_request_of_full_length(bench: Bench) -> None:
    pools = {"kv": 16, "comp": 4, "win": 8, "state": 2}
    settings = config(max_model_len=64, pool_sizes=pools, max_num_batched_tokens=8)
    core = bench.core(settings=settings)
    log = run(core, *(request(str(i), prompt(20, i), 100) for i in range(5)))
    for i in range(5):
        assert log.tokens(str(i)) == reference_greedy(prompt(20, i), 44)
        assert log.finished(str(i)).reason == FinishReason.FINISH_REASON_LENGTH


def test_pools_too_small_for_one_request_are_refused(bench: Bench) -> None:
    with pytest.raises(ValueError, match="kv gets 15"):
        bench.core(settings=config(max_model_len=64, pool_sizes={"kv": 15}))


def test_pages_that_do_not_fill_a_unit_are_refused(bench: Bench) -> None:
    with pytest.raises(ValueError, match="page_tokens 64 of cache group kv"):
        bench.core(ToyModel((paged(64),), ngram=False))


@pytest.mark.parametrize("length", [1, 16, 17, 32, 33, 100])
def test_a_hit_gives_the_output_of_a_cold_run(bench: Bench, length: int) -> None:
    core = bench.core()
    cold = run(core, request("cold", prompt(length), 20))
    warm = run(core, request("warm", prompt(length), 20))
    assert warm.tokens("warm") == cold.tokens("cold")
    assert warm.prompts["warm"].cached == (length - 1) // UNIT * UNIT
    assert warm.prompts["warm"].external_cached == 0
    assert cold.prompts["cold"].created == length // UNIT * UNIT


def test_the_next_turn_hits_the_end_of_the_last_one(bench: Bench) -> None:
    core = bench.core()
    first = prompt(50)
    answer = run(core, request("one", first, 60)).tokens("one")
    second = first + answer + prompt(9, seed=5)
    log = run(core, request("two", second, 10))
    assert log.prompts["two"].cached == 96  # 109 of 110 tokens were computed: units of 16
    assert log.tokens("two") == reference_greedy(second, 10)


def test_a_branch_point_gets_a_snapshot(bench: Bench) -> None:
    core = bench.core(settings=config(prefix_cache_retention_interval=0))
    shared = prompt(50)
    for i, cached in enumerate((0, 0, 48)):
        tokens = shared + prompt(40, seed=10 + i)
        log = run(core, request(str(i), tokens, 5))
        assert log.prompts[str(i)].cached == cached
        assert log.tokens(str(i)) == reference_greedy(tokens, 5)


def test_prompts_that_share_an_interval_hit_it(bench: Bench) -> None:
    core = bench.core(settings=config(prefix_cache_retention_interval=2 * UNIT))
    shared = prompt(70)
    run(core, request("a", shared + prompt(60, 1), 5))
    log = run(core, request("b", shared + prompt(60, 2), 5))
    assert log.prompts["b"].cached == 64
    assert log.tokens("b") == reference_greedy(shared + prompt(60, 2), 5)


def test_another_salt_never_hits(bench: Bench) -> None:
    core = bench.core()
    run(core, request("a", prompt(50), 5, cache_salt="one"))
    assert run(core, request("b", prompt(50), 5, cache_salt="two")).prompts["b"].cached == 0
    assert run(core, request("c", prompt(50), 5, cache_salt="one")).prompts["c"].cached == 48


def test_without_prefix_caching_nothing_is_kept(bench: Bench) -> None:
    core = bench.core(settings=config(enable_prefix_caching=False))
    for i in range(2):
        log = run(core, request(str(i), prompt(50), 20))
        assert log.prompts[str(i)].cached == log.prompts[str(i)].created == 0
        assert log.tokens(str(i)) == reference_greedy(prompt(50), 20)
    assert all(g.cached == 0 for g in core.load().groups)


def test_reset_drops_what_nobody_uses(bench: Bench) -> None:
    core = bench.core()
    run(core, request("a", prompt(100), 5))
    cached = sum(g.cached for g in core.load().groups)
    assert cached > 0
    assert core.reset_prefix_cache() == cached
    assert run(core, request("b", prompt(100), 5)).prompts["b"].cached == 0


def test_reset_while_a_request_runs_keeps_its_output(bench: Bench) -> None:
    core = bench.core()
    core.submit(request("a", prompt(100), 30))
    log = Log()
    for _ in range(10):
        log.add(core.step())
        core.reset_prefix_cache()
        core.check_invariants()
    run(core, log=log)
    assert log.tokens("a") == reference_greedy(prompt(100), 30)


def test_choices_share_the_prompt_and_differ_by_seed(bench: Bench) -> None:
    model = ToyModel()
    core = bench.core(model)
    log = run(core, request("a", prompt(70), 12, n=4))
    for choice in range(4):
        assert log.tokens("a", choice) == reference_greedy(prompt(70), 12)
        assert log.finished("a", choice).completion_tokens == 12
    assert core.load().prefix_hit_tokens == 3 * 64
    assert max(model.batch_sizes) == 4


def test_stop_token_ends_the_choice_and_is_reported(bench: Bench) -> None:
    expected = reference_greedy(prompt(20), 30)
    stop = expected[12]
    first = expected.index(stop)
    log = run(
        bench.core(),
        request("stop", prompt(20), 30, stopping=RequestStopping(0, stop_token_ids=(stop,))),
        request("eos", prompt(20), 30, stopping=RequestStopping(0, eos_token_ids=(stop,))),
        request(
            "ignored",
            prompt(20),
            30,
            stopping=RequestStopping(0, eos_token_ids=(stop,), ignore_eos=True),
        ),
    )
    for name in ("stop", "eos"):
        assert log.tokens(name) == expected[: first + 1]
        assert log.finished(name).reason == FinishReason.FINISH_REASON_STOP
        assert log.finished(name).stop_token_id == stop
    assert log.tokens("ignored") == expected
    assert log.finished("ignored").stop_token_id is None


def test_min_tokens_keeps_stop_tokens_from_being_chosen(bench: Bench) -> None:
    expected = reference_greedy(prompt(20), 30)
    stopping = RequestStopping(0, min_tokens=20, stop_token_ids=tuple(set(expected)))
    log = run(bench.core(), request("a", prompt(20), 30, stopping=stopping))
    assert not set(log.tokens("a")[:20]) & set(expected)
    assert len(log.tokens("a")) >= 20


def test_output_ends_at_the_context_length(bench: Bench) -> None:
    core = bench.core(settings=config(max_model_len=64))
    log = run(core, request("a", prompt(60), 100), request("b", prompt(63), 100))
    assert log.tokens("a") == reference_greedy(prompt(60), 4)
    assert log.tokens("b") == reference_greedy(prompt(63), 1)
