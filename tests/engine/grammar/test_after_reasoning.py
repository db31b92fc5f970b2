"""A grammar behind reasoning in the sampler: it begins wherever in a step the reasoning ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer

from services.common.cli.up import DEFAULT_MODEL as NANO
from services.engine.grammar.compiled import compile_grammar, make_matcher
from services.engine.sampling.params import GrammarUse, SamplingParams
from services.engine.sampling.sampler import RowGroup, Sampler
from services.engine.scheduler.plan import SequenceBegin, SequenceId

TOKENIZER = Tokenizer.from_file(str(NANO / "tokenizer.json"))
VOCAB = 1024
OPEN, CLOSE, THINK_END, END = map(TOKENIZER.token_to_id, ("{", "}", "</think>", "<|im_end|>"))
SEQUENCE = SequenceId(0)


@pytest.fixture(scope="module")
def grammar() -> bytes:
    return compile_grammar("json_object", True, gap=True, folder=NANO, vocab_size=VOCAB)


def logits_at(position: int, thoughts: Sequence[int]) -> torch.Tensor:
    """A model that would open an object for ever once it has thought."""
    row = torch.zeros(VOCAB)
    row[[OPEN, CLOSE, END]] = torch.tensor([9.0, 8.0, 7.0])
    if position <= len(thoughts):
        row[[*thoughts, THINK_END][position]] = 20.0
    return row


def generated(
    grammar: bytes, thoughts: Sequence[int], guess: Sequence[int], most: int
) -> list[int]:
    """The output with up to `most` drafts a step, which are those of `guess`."""
    sampler = Sampler(
        VOCAB, torch.device("cpu"), lambda data, ends: make_matcher(data, NANO, VOCAB, ends)
    )
    use = GrammarUse(grammar, THINK_END)
    params = SamplingParams(temperature=0.0, grammar=use, stop_token_ids=(END,))
    sampler.begin(SEQUENCE, SequenceBegin(params))
    out: list[int] = []
    while END not in out and len(out) < 20:
        drafts = tuple(guess[len(out) : len(out) + most])
        sampler.start_masks(SEQUENCE, drafts)
        rows = [logits_at(len(out) + i, thoughts) for i in range(1 + len(drafts))]
        ((tokens, _),) = sampler.sample(torch.stack(rows), [RowGroup(SEQUENCE, len(out), drafts)])
        out += tokens
    return out[: out.index(END) + 1] if END in out else out


@pytest.mark.parametrize("right", [True, False], ids=["right drafts", "drafts without grammar"])
def test_grammar_begins_behind_the_reasoning_at_any_place_of_a_step(
    grammar: bytes, right: bool
) -> None:
    for count in range(7):
        thoughts = [OPEN] * count
        expected = [*thoughts, THINK_END, OPEN, CLOSE, END]
        guess = expected if right else [*thoughts, THINK_END, OPEN, OPEN, OPEN]
        for most in range(6):
            assert generated(grammar, thoughts, guess, most) == expected, (count, most)
