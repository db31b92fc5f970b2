"""A token's logits are the same bits whatever the batch, the cut, the pages or the restart."""

from __future__ import annotations

import random

import pytest
import torch

from tests.models.deepseek_v4.conftest import GetNano, Model, load, prompt
from tests.models.runner import Live, Part, Runner

TOKENS = 150  # beyond the first HCA entry at 128 and the index top-k of 8 entries


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return prompt(TOKENS, seed=11)


@pytest.fixture(scope="module")
def expected(nano: Model, ids: list[int]) -> torch.Tensor:
    return Runner([nano]).run(ids, TOKENS)


@pytest.mark.parametrize("chunk", [5, 64, 129])
def test_chunk_size_changes_no_bit(
    runner: Runner, ids: list[int], expected: torch.Tensor, chunk: int
) -> None:
    assert torch.equal(runner.run(ids, chunk), expected)


@pytest.mark.parametrize("seed", [0, 1])
def test_random_schedules_with_batch_mates_change_no_bit(nano: Model, seed: int) -> None:
    """Sequences of odd lengths, cut at random, packed in random order with random company."""
    rng = random.Random(seed)
    runner = Runner([nano], seed=seed)
    prompts = [prompt(n, seed=20 + n) for n in (5, 31, 64, 140, 47)]
    alone = [runner.run(ids, len(ids)) for ids in prompts]
    lives = [Live() for _ in prompts]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    while waiting := [i for i, live in enumerate(lives) if len(live.ids) < len(prompts[i])]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        parts = []
        for i in chosen:
            rest = prompts[i][len(lives[i].ids) :]
            parts.append(Part(lives[i], rest[: rng.choice([1, 2, 4, 9, 33])]))
        for i, logits in zip(chosen, runner.step(parts)[0], strict=True):
            found[i].append(logits)
    for rows, whole in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(rows), whole)


def test_sixteen_decodes_together_equal_each_alone(runner: Runner) -> None:
    prompts = [prompt(4 + i % 9, seed=60 + i) for i in range(16)]
    lives = [Live() for _ in prompts]
    runner.step([Part(live, ids[:-1]) for live, ids in zip(lives, prompts, strict=True)])
    parts = [Part(live, ids[-1:]) for live, ids in zip(lives, prompts, strict=True)]
    together = runner.step(parts)[0]
    for live in lives:
        runner.release(live)
    for ids, logits in zip(prompts, together, strict=True):
        assert torch.equal(runner.run(ids, len(ids))[-1:], logits)


def test_a_snapshot_in_mid_chunk_continues_with_the_same_bits(
    runner: Runner, ids: list[int], expected: torch.Tensor
) -> None:
    """A second sequence shares pages of the first up to a boundary and starts from its state."""
    first, mate = Live(), Live()
    parts = [Part(mate, prompt(9, seed=1)), Part(first, ids[:140], snapshots=[127])]
    _, slots = runner.step(parts)
    restored = runner.fork(first, ids[:128], slots[1][0])
    rest = range(128, TOKENS, 5)
    found = torch.cat([runner.step([Part(restored, ids[i : i + 5])])[0][0] for i in rest])
    assert torch.equal(found, expected[128:])


@pytest.mark.parametrize("accepted", [1, 3])
def test_rejected_drafts_leave_nothing_behind(
    runner: Runner, ids: list[int], expected: torch.Tensor, accepted: int
) -> None:
    """Drafts across position 128, where windows of both ratios close; some are dropped."""
    live = Live()
    runner.step([Part(live, ids[:125])])
    drafted = [*ids[125 : 125 + accepted], *[9, 10, 11, 12][: 5 - accepted]]
    verified, slots = runner.step([Part(live, drafted, snapshots=range(4))])
    assert torch.equal(verified[0][:accepted], expected[125 : 125 + accepted])
    live.ids = ids[: 125 + accepted]
    live.slot = slots[0][accepted - 1]
    rest = [runner.step([Part(live, [t])])[0][0] for t in ids[125 + accepted : 135]]
    assert torch.equal(torch.cat(rest), expected[125 + accepted : 135])


def test_bf16_activations_change_no_bit_either(get_nano: GetNano, ids: list[int]) -> None:
    runner = Runner([load(get_nano("0731"), dtype=torch.bfloat16)])
    assert torch.equal(runner.run(ids[:50], 7), runner.run(ids[:50], 50))
