"""A token's logits are the same bits whatever the batch, the cut, the pages or the restart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.engine.runtime.tables_api import TableSource
from tests.models.deepseek_v41.conftest import prompt
from tests.models.independence import (
    check_random_schedules,
    check_rejected_drafts,
    check_snapshot,
)
from tests.models.runner import Runner

TOKENS = 80  # beyond the window of 16, the top 6 of 40 and 80 entries, and 4 candidate blocks


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return prompt(TOKENS, seed=11)


@pytest.fixture(scope="module")
def expected(exact: Any, tables: TableSource, ids: list[int]) -> torch.Tensor:
    return Runner([exact], tables).run(ids, TOKENS)


@pytest.mark.parametrize("chunk", [3, 17, 64])
def test_chunk_size_changes_no_bit(
    runner: Runner, ids: list[int], expected: torch.Tensor, chunk: int
) -> None:
    assert torch.equal(runner.run(ids, chunk), expected)


def test_chunk_size_changes_no_bit_of_a_quantised_cache(
    quantised: Any, tables: TableSource, ids: list[int]
) -> None:
    runner = Runner([quantised], tables)
    assert torch.equal(runner.run(ids, 7), runner.run(ids, TOKENS))


def test_random_schedules_with_batch_mates_change_no_bit(exact: Any, tables: TableSource) -> None:
    prompts = [prompt(n, seed=20 + n) for n in (5, 31, 64, 47)]
    check_random_schedules(Runner([exact], tables, seed=5), prompts, [1, 4, 9, 33], 5)


def test_a_snapshot_in_mid_chunk_continues_with_the_same_bits(
    runner: Runner, ids: list[int], expected: torch.Tensor
) -> None:
    check_snapshot(runner, ids, expected, prompt(9, seed=1), [63], computed=75)


@pytest.mark.parametrize("accepted", [1, 2])
def test_rejected_drafts_leave_nothing_behind(
    runner: Runner, ids: list[int], expected: torch.Tensor, accepted: int
) -> None:
    """Drafts begin inside an open window of two tokens; some are dropped."""
    check_rejected_drafts(runner, ids, expected, 61, accepted, drafts=5, end=70)
