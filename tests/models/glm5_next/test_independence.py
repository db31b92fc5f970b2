"""A token's logits are the same bits whatever the batch, the cut, the pages or the restart."""

from __future__ import annotations

import pytest
import torch

from tests.models.glm5_next.conftest import Model, prompt
from tests.models.independence import (
    check_joint_decodes,
    check_random_schedules,
    check_rejected_drafts,
    check_snapshot,
)
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
    prompts = [prompt(n, seed=20 + n) for n in (5, 31, 64, 90, 47, 8)]
    check_random_schedules(Runner([nano], seed=seed), prompts, [1, 2, 4, 9, 33], seed)


def test_sixteen_decodes_together_equal_each_alone(runner: Runner) -> None:
    check_joint_decodes(runner, [prompt(14 + i % 9, seed=60 + i) for i in range(16)])


def test_a_snapshot_in_mid_chunk_continues_with_the_same_bits(
    runner: Runner, ids: list[int], expected: torch.Tensor
) -> None:
    check_snapshot(runner, ids, expected, prompt(9, seed=1), [15, 63], computed=80)


@pytest.mark.parametrize("start", [36, 37, 38, 39])
def test_rejected_drafts_leave_nothing_behind(
    runner: Runner, ids: list[int], expected: torch.Tensor, start: int
) -> None:
    """Drafts from every phase of a pool complete one; three of five are dropped."""
    check_rejected_drafts(runner, ids, expected, start, accepted=2, drafts=5, end=start + 9)


def test_a_state_that_was_never_written_shows(runner: Runner) -> None:
    """The harness itself: pools start as NaN, and a sequence that claims a state reads them."""
    live = Live(slot=runner.free_slots.pop())
    assert runner.step([Part(live, prompt(8, seed=1))])[0][0].isnan().any()
