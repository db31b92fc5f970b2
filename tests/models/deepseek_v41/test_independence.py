"""A token's logits are the same bits whatever the batch, the cut, the pages or the restart."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from services.engine.runtime.tables_api import TableSource
from tests.models.deepseek_v41.conftest import prompt
from tests.models.runner import Live, Part, Runner

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
    """Sequences of odd lengths, cut at random, packed in random order with random company."""
    rng = random.Random(5)
    runner = Runner([exact], tables, seed=5)
    prompts = [prompt(n, seed=20 + n) for n in (5, 31, 64, 47)]
    alone = [runner.run(ids, len(ids)) for ids in prompts]
    lives = [Live() for _ in prompts]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    while waiting := [i for i, live in enumerate(lives) if len(live.ids) < len(prompts[i])]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        parts = []
        for i in chosen:
            rest = prompts[i][len(lives[i].ids) :]
            parts.append(Part(lives[i], rest[: rng.choice([1, 4, 9, 33])]))
        for i, logits in zip(chosen, runner.step(parts)[0], strict=True):
            found[i].append(logits)
    for rows, whole in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(rows), whole)


def test_a_snapshot_in_mid_chunk_continues_with_the_same_bits(
    runner: Runner, ids: list[int], expected: torch.Tensor
) -> None:
    """A second sequence shares pages of the first up to a boundary and starts from its state."""
    first, mate = Live(), Live()
    parts = [Part(mate, prompt(9, seed=1)), Part(first, ids[:75], snapshots=[63])]
    _, slots = runner.step(parts)
    restored = runner.fork(first, ids[:64], slots[1][0])
    rest = range(64, TOKENS, 5)
    found = torch.cat([runner.step([Part(restored, ids[i : i + 5])])[0][0] for i in rest])
    assert torch.equal(found, expected[64:])


@pytest.mark.parametrize("accepted", [1, 2])
def test_rejected_drafts_leave_nothing_behind(
    runner: Runner, ids: list[int], expected: torch.Tensor, accepted: int
) -> None:
    """Drafts begin inside an open window of two tokens; some are dropped."""
    live = Live()
    runner.step([Part(live, ids[:61])])
    drafted = [*ids[61 : 61 + accepted], *[9, 10, 11, 12][: 5 - accepted]]
    verified, slots = runner.step([Part(live, drafted, snapshots=range(4))])
    assert torch.equal(verified[0][:accepted], expected[61 : 61 + accepted])
    live.ids = ids[: 61 + accepted]
    live.slot = slots[0][accepted - 1]
    rest = [runner.step([Part(live, [t])])[0][0] for t in ids[61 + accepted : 70]]
    assert torch.equal(torch.cat(rest), expected[61 + accepted : 70])
