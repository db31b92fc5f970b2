"""A token's logits are the same bits whatever the batch, the cut, the pages or the restart."""

from __future__ import annotations

import random

import pytest
import torch

from tests.models.glm5_next.conftest import Model, prompt
from tests.models.runner import Live, Part, Runner

TOKENS = 90


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return prompt(TOKENS, seed=11)


@pytest.fixture(scope="module")
def expected(nano: Model, ids: list[int]) -> torch.Tensor:
    return Runner([nano]).run(ids, TOKENS)


@pytest.mark.parametrize("chunk", [1, 7, 13, 64])
def test_chunk_size_changes_no_bit(
    runner: Runner, ids: list[int], expected: torch.Tensor, chunk: int
) -> None:
    count = TOKENS if chunk > 1 else 50
    assert torch.equal(runner.run(ids[:count], chunk), expected[:count])


@pytest.mark.parametrize("seed", [0, 1])
def test_random_schedules_with_batch_mates_change_no_bit(nano: Model, seed: int) -> None:
    """Sequences of odd lengths, cut at random, packed in random order with random company."""
    rng = random.Random(seed)
    runner = Runner([nano], seed=seed)
    prompts = [prompt(n, seed=20 + n) for n in (5, 31, 64, 90, 47, 8)]
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
    prompts = [prompt(14 + i % 9, seed=60 + i) for i in range(16)]
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
    parts = [Part(mate, prompt(9, seed=1)), Part(first, ids[:80], snapshots=[15, 63])]
    _, slots = runner.step(parts)
    restored = runner.fork(first, ids[:64], slots[1][1])
    rest = range(64, TOKENS, 5)
    found = torch.cat([runner.step([Part(restored, ids[i : i + 5])])[0][0] for i in rest])
    assert torch.equal(found, expected[64:])


@pytest.mark.parametrize("start", [36, 37, 38, 39])
def test_rejected_drafts_leave_nothing_behind(
    runner: Runner, ids: list[int], expected: torch.Tensor, start: int
) -> None:
    """Four drafts from every phase of a pool, each completing one; two of them are dropped."""
    live = Live()
    runner.step([Part(live, ids[:start])])
    drafted = [*ids[start : start + 2], 9, 10, 11]
    verified, slots = runner.step([Part(live, drafted, snapshots=range(4))])
    assert torch.equal(verified[0][:2], expected[start : start + 2])
    live.ids = ids[: start + 2]
    live.slot = slots[0][1]
    rest = [runner.step([Part(live, [t])])[0][0] for t in ids[start + 2 : start + 9]]
    assert torch.equal(torch.cat(rest), expected[start + 2 : start + 9])


def test_a_state_that_was_never_written_shows(runner: Runner) -> None:
    """The harness itself: pools start as NaN, and a sequence that claims a state reads them."""
    live = Live(slot=runner.free_slots.pop())
    assert runner.step([Part(live, prompt(8, seed=1))])[0][0].isnan().any()
