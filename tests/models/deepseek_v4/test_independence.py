"""A token's logits are the same bits whatever the batch, the cut, the pages or the restart."""

from __future__ import annotations

import pytest
import torch

from tests.models.deepseek_v4.conftest import GetNano, Model, load, prompt
from tests.models.independence import (
    check_joint_decodes,
    check_random_schedules,
    check_rejected_drafts,
    check_snapshot,
)
from tests.models.runner import Runner

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
    prompts = [prompt(n, seed=20 + n) for n in (5, 31, 64, 140, 47)]
    check_random_schedules(Runner([nano], seed=seed), prompts, [1, 2, 4, 9, 33], seed)


def test_sixteen_decodes_together_equal_each_alone(runner: Runner) -> None:
    check_joint_decodes(runner, [prompt(4 + i % 9, seed=60 + i) for i in range(16)])


def test_a_snapshot_in_mid_chunk_continues_with_the_same_bits(
    runner: Runner, ids: list[int], expected: torch.Tensor
) -> None:
    check_snapshot(runner, ids, expected, prompt(9, seed=1), [127], computed=140)


@pytest.mark.parametrize("accepted", [1, 3])
def test_rejected_drafts_leave_nothing_behind(
    runner: Runner, ids: list[int], expected: torch.Tensor, accepted: int
) -> None:
    """Drafts across position 128, where windows of both ratios close; some are dropped."""
    check_rejected_drafts(runner, ids, expected, 125, accepted, drafts=5, end=135)


def test_bf16_activations_change_no_bit_either(get_nano: GetNano, ids: list[int]) -> None:
    runner = Runner([load(get_nano("0731"), dtype=torch.bfloat16)])
    assert torch.equal(runner.run(ids[:50], 7), runner.run(ids[:50], 50))
