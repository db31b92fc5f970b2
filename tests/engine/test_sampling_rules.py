"""Bad words and thinking budgets in the sampler, with drafts and after a preemption."""

from __future__ import annotations

from dataclasses import replace

import torch

from services.engine.sampling.params import ThinkingBudget
from services.engine.scheduler.plan import SequenceBegin
from tests.engine.test_sampler import GREEDY, draw, rising, sampler


def test_a_bad_token_is_never_drawn_and_the_next_best_is() -> None:
    made = sampler(SequenceBegin(replace(GREEDY, bad_words=((49,), (48,)))))
    assert [draw(made, rising())[0] for _ in range(3)] == [47, 47, 47]


def test_a_bad_sequence_is_broken_at_its_last_token_only() -> None:
    made = sampler(SequenceBegin(replace(GREEDY, bad_words=((49, 49, 49),))))
    assert [draw(made, rising())[0] for _ in range(6)] == [49, 49, 48, 49, 49, 48]


def test_tokens_before_a_preemption_belong_to_a_bad_sequence() -> None:
    params = replace(GREEDY, bad_words=((49, 49, 49),))
    made = sampler(SequenceBegin(params, (), (49, 49), output_tokens=2))
    assert draw(made, rising()) == (48,)


def test_drafts_that_complete_a_bad_sequence_are_not_accepted() -> None:
    made = sampler(SequenceBegin(replace(GREEDY, bad_words=((49, 49, 49),))))
    assert draw(made, rising(4), 9, 49, 49, 49) == (49, 49, 48)
    assert draw(made, rising(1)) == (49,)


def test_a_row_whose_every_token_is_bad_keeps_them() -> None:
    params = replace(GREEDY, allowed_token_ids=(7,), bad_words=((7,),))
    assert draw(sampler(SequenceBegin(params)), rising()) == (7,)


def test_reasoning_ends_when_its_tokens_are_used_up() -> None:
    made = sampler(SequenceBegin(replace(GREEDY, thinking_budget=ThinkingBudget(3, 5))))
    assert [draw(made, rising())[0] for _ in range(6)] == [49, 49, 49, 5, 49, 49]


def test_reasoning_that_ended_by_itself_is_not_ended_again() -> None:
    made = sampler(SequenceBegin(replace(GREEDY, thinking_budget=ThinkingBudget(2, 49))))
    assert [draw(made, rising())[0] for _ in range(2)] == [49, 49]
    bias = replace(GREEDY, thinking_budget=ThinkingBudget(2, 5), logit_bias={5: 100.0})
    made = sampler(SequenceBegin(bias))
    first = draw(made, rising())
    falling = torch.flip(rising(), (1,))
    falling[:, 5] -= 200
    assert (first, [draw(made, falling)[0] for _ in range(4)]) == ((5,), [0] * 4)


def test_a_budget_holds_within_a_step_of_drafts() -> None:
    made = sampler(SequenceBegin(replace(GREEDY, thinking_budget=ThinkingBudget(2, 5))))
    assert draw(made, rising(5), 9, 49, 49, 5, 49) == (49, 49, 5, 49, 49)
    made = sampler(SequenceBegin(replace(GREEDY, thinking_budget=ThinkingBudget(2, 5))))
    assert draw(made, rising(4), 9, 49, 49, 49) == (49, 49, 5)


def test_a_budget_goes_on_after_a_preemption() -> None:
    params = replace(GREEDY, thinking_budget=ThinkingBudget(3, 5))
    made = sampler(SequenceBegin(params, (), (49, 49), output_tokens=2))
    assert [draw(made, rising())[0] for _ in range(3)] == [49, 5, 49]
    made = sampler(SequenceBegin(params, (), (49, 5), output_tokens=2))
    assert [draw(made, rising())[0] for _ in range(3)] == [49, 49, 49]
