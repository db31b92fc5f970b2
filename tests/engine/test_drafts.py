"""Verification of several tokens per step: the output is that without drafts, states included."""

from __future__ import annotations

import pytest

from services.engine.scheduler.messages import RequestSampling, RequestStopping
from tests.engine.driver import Bench, config, request, run
from tests.engine.fakes import HalfRightDrafts
from tests.engine.test_core import prompt
from tests.engine.toy_model import ToyModel, reference_greedy


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_greedy_output_is_that_without_drafts(bench: Bench, wrong: float) -> None:
    model = ToyModel()
    core = bench.core(model, config(num_speculative_tokens=5), drafts=HalfRightDrafts(wrong))
    log = run(core, *(request(str(n), prompt(n), 50) for n in (1, 16, 31, 70)))
    for n in (1, 16, 31, 70):
        assert log.tokens(str(n)) == reference_greedy(prompt(n), 50)
    load = core.load()
    assert load.draft_tokens > 0
    assert (load.accepted_draft_tokens == load.draft_tokens) == (wrong == 0.0)
    places = list(load.accepted_by_position)
    assert sum(places) == load.accepted_draft_tokens and places == sorted(places, reverse=True)
    assert len(places) <= 5 and (not places or places[0] <= load.drafts)
    if wrong == 0.0:
        assert len(model.batch_sizes) < 50


def test_drafts_across_unit_boundaries_leave_exact_snapshots(bench: Bench) -> None:
    settings = config(num_speculative_tokens=7)
    core = bench.core(settings=settings, drafts=HalfRightDrafts(0.4))
    answer = run(core, request("one", prompt(30), 90)).tokens("one")
    for length in range(31, 121, 8):
        tokens = (prompt(30) + answer)[:length]
        log = run(core, request(f"again {length}", tokens, 9))
        assert log.tokens(f"again {length}") == reference_greedy(tokens, 9)
    full = prompt(30) + answer
    log = run(core, request("next turn", full, 9))
    assert log.prompts["next turn"].cached == 112


def test_sampled_output_is_that_without_drafts(bench: Bench) -> None:
    sampling = RequestSampling(
        temperature=1.0, top_k=9, top_p=0.9, seed=5, frequency_penalty=0.7, repetition_penalty=1.2
    )
    requests = [request(str(n), prompt(n), 40, sampling=sampling) for n in (5, 40)]
    plain = run(bench.core(), *requests)
    drafted = run(
        bench.core(settings=config(num_speculative_tokens=4), drafts=HalfRightDrafts(0.5)),
        *requests,
    )
    for n in ("5", "40"):
        assert drafted.tokens(n) == plain.tokens(n)


def test_a_stop_token_among_accepted_drafts_ends_the_choice_there(bench: Bench) -> None:
    expected = reference_greedy(prompt(20), 30)
    stop = expected[9]
    stopping = RequestStopping(0, stop_token_ids=(stop,))
    core = bench.core(settings=config(num_speculative_tokens=7), drafts=HalfRightDrafts(0.0))
    log = run(core, request("a", prompt(20), 30, stopping=stopping))
    assert log.tokens("a") == expected[: expected.index(stop) + 1]
    assert log.finished("a").stop_token_id == stop


def test_min_tokens_holds_for_every_token_of_a_step(bench: Bench) -> None:
    expected = reference_greedy(prompt(20), 30)
    stopping = RequestStopping(0, min_tokens=7, stop_token_ids=(expected[0], expected[5]))
    plain = run(bench.core(), request("a", prompt(20), 30, stopping=stopping))
    core = bench.core(settings=config(num_speculative_tokens=5), drafts=HalfRightDrafts(0.2))
    drafted = run(core, request("a", prompt(20), 30, stopping=stopping))
    assert drafted.tokens("a") == plain.tokens("a")
    assert not {expected[0], expected[5]} & set(drafted.tokens("a")[:7])


def test_drafts_give_way_when_slots_are_short(bench: Bench) -> None:
    settings = config(num_speculative_tokens=4, state_slots=7, max_num_seqs=4)
    core = bench.core(settings=settings, drafts=HalfRightDrafts(0.2))
    log = run(core, *(request(str(n), prompt(n), 40) for n in (20, 21, 22, 23)))
    for n in (20, 21, 22, 23):
        assert log.tokens(str(n)) == reference_greedy(prompt(n), 40)
