"""The sampler of a step: settings per sequence, history, drafts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from services.engine.grammar.compiled import Matcher
from services.engine.sampling.params import GrammarUse, SamplingParams
from services.engine.sampling.sampler import RowGroup, Sampler, score
from services.engine.scheduler.plan import SequenceBegin, SequenceId

VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)


def sampler(*begins: SequenceBegin) -> Sampler:
    made = Sampler(VOCAB, torch.device("cpu"))
    for i, begin in enumerate(begins):
        made.begin(SequenceId(i), begin)
    return made


def rising(rows: int = 1) -> torch.Tensor:
    """The highest id is the most likely."""
    return torch.arange(VOCAB, dtype=torch.float32).expand(rows, -1).clone() / 10


def draw(made: Sampler, logits: torch.Tensor, position: int = 9, *drafts: int) -> tuple[int, ...]:
    return made.sample(logits, [RowGroup(SequenceId(0), position, drafts)])[0][0]


def test_bias_moves_the_choice() -> None:
    params = replace(GREEDY, logit_bias={3: 100.0, 4: -100.0})
    assert draw(sampler(SequenceBegin(params)), rising()) == (3,)


def test_only_allowed_ids_are_chosen() -> None:
    params = replace(GREEDY, allowed_token_ids=(7, 2), logit_bias={40: 100.0})
    assert draw(sampler(SequenceBegin(params)), rising()) == (7,)


def test_stop_ids_are_blocked_for_the_first_min_tokens() -> None:
    made = sampler(SequenceBegin(replace(GREEDY, stop_token_ids=(49, 48), min_tokens=2)))
    assert [draw(made, rising())[0] for _ in range(4)] == [47, 47, 49, 49]


def test_tokens_before_a_preemption_count_for_min_tokens() -> None:
    params = replace(GREEDY, stop_token_ids=(49,), min_tokens=2)
    made = sampler(SequenceBegin(params, output_tokens=1))
    assert [draw(made, rising())[0] for _ in range(2)] == [48, 49]


def test_penalties_count_every_token_that_was_drawn() -> None:
    made = sampler(SequenceBegin(replace(GREEDY, frequency_penalty=0.15)))
    first = [draw(made, rising())[0] for _ in range(5)]
    begin = SequenceBegin(
        replace(GREEDY, frequency_penalty=0.15), (), tuple(first[:3]), output_tokens=3
    )
    resumed = sampler(begin)
    assert [draw(resumed, rising())[0] for _ in range(2)] == first[3:]
    assert first == [49, 48, 49, 47, 48]


def test_the_prompt_counts_for_repetition_alone() -> None:
    prompt = (49,)
    repetition = SequenceBegin(replace(GREEDY, repetition_penalty=2.0), prompt)
    presence = SequenceBegin(replace(GREEDY, presence_penalty=2.0), prompt)
    assert draw(sampler(repetition), rising()) == (48,)
    assert draw(sampler(presence), rising()) == (49,)


def test_a_seed_and_a_position_decide_the_token() -> None:
    params = SamplingParams(seed=(1 << 64) - 3)
    flat = torch.zeros(1, VOCAB)
    draws = [draw(sampler(SequenceBegin(params)), flat, p)[0] for p in range(200)]
    assert draws == [draw(sampler(SequenceBegin(params)), flat, p)[0] for p in range(200)]
    others = replace(params, seed=5)
    assert draws != [draw(sampler(SequenceBegin(others)), flat, p)[0] for p in range(200)]
    assert len(set(draws)) > VOCAB // 2


def test_drafts_are_accepted_up_to_the_first_that_differs() -> None:
    logits = rising(4)
    begin = SequenceBegin(GREEDY)
    assert draw(sampler(begin), logits, 9, 49, 49, 49) == (49, 49, 49, 49)
    assert draw(sampler(begin), logits, 9, 49, 1, 49) == (49, 49)
    assert draw(sampler(begin), logits, 9, 1, 49, 49) == (49,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_behind_drafts_see_the_drafts(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature,
        seed=11,
        presence_penalty=1.0,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        stop_token_ids=(49,),
        min_tokens=3,
    )
    begin = SequenceBegin(params, prompt_token_ids=(1, 45))
    one_by_one = sampler(begin)
    expected = tuple(draw(one_by_one, rising(), 9 + i)[0] for i in range(5))
    assert draw(sampler(begin), rising(5), 9, *expected[:4]) == expected


def test_mixed_settings_do_not_touch_each_other() -> None:
    begins = [
        SequenceBegin(GREEDY),
        SequenceBegin(SamplingParams(temperature=1.0, seed=3, top_k=5, logprobs=2)),
        SequenceBegin(replace(GREEDY, logit_bias={3: 100.0}, logprobs=0)),
        SequenceBegin(SamplingParams(temperature=0.7, seed=4, top_p=0.6)),
    ]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, VOCAB, generator=generator)
    groups = [RowGroup(SequenceId(i), 20 + i) for i in range(4)]
    together = sampler(*begins).sample(logits, groups)
    for i in range(4):
        alone = sampler(*begins).sample(logits[i : i + 1].clone(), groups[i : i + 1])
        assert alone == together[i : i + 1]
    assert [len(scores) for _, scores in together] == [0, 1, 1, 0]


def test_logprobs_are_those_of_the_model() -> None:
    params = replace(GREEDY, logit_bias={3: 100.0}, logprobs=3)
    made = sampler(SequenceBegin(params))
    ((tokens, (logprob,)),) = made.sample(rising(), [RowGroup(SequenceId(0), 9)])
    expected = torch.log_softmax(rising().double(), -1)[0]
    assert tokens == (3,)
    assert logprob.logprob == pytest.approx(float(expected[3]), abs=1e-6)
    assert logprob.rank == 47
    assert [token for token, _ in logprob.top] == [49, 48, 47]


def test_scores_of_no_tokens_are_empty() -> None:
    assert score(torch.zeros(0, VOCAB), (), 3) == ()


def test_others_draw_while_a_grammar_loads() -> None:
    loaded = threading.Event()

    def load(compiled: bytes, stops: Sequence[int]) -> Matcher:
        loaded.wait()
        raise ValueError("loaded")

    made = Sampler(VOCAB, torch.device("cpu"), load)
    made.begin(SequenceId(0), SequenceBegin(GREEDY))
    made.begin(SequenceId(1), SequenceBegin(replace(GREEDY, grammar=GrammarUse(b"grammar"))))
    assert draw(made, rising()) == (49,)
    loaded.set()
    with pytest.raises(ValueError, match="loaded"):
        made.sample(rising(), [RowGroup(SequenceId(1), 9)])


def test_an_ended_sequence_is_forgotten() -> None:
    made = sampler(SequenceBegin(GREEDY))
    made.end(SequenceId(0))
    with pytest.raises(KeyError):
        draw(made, rising())
