"""A token's logits are the same bits whatever the batch, the cut, the pages or the restart."""

from __future__ import annotations

import pytest
import torch

from tests.models.conftest import GetTiny, runner_of
from tests.models.independence import check_random_schedules
from tests.models.runner import Live, Part, Runner
from tests.models.tiny import Family, Layout, prompt

CASES: list[tuple[Family, Layout]] = [("qwen4_exp", "fp8"), ("qwen3_5", "bf16")]
both = pytest.mark.parametrize(("family", "layout"), CASES)


@both
@pytest.mark.parametrize("chunk", [1, 7, 13, 64])
def test_chunk_size_changes_no_bit(
    get_tiny: GetTiny, family: Family, layout: Layout, chunk: int
) -> None:
    ids = prompt(75, seed=11)
    runner = runner_of(get_tiny(family, layout).folder)
    assert torch.equal(runner.run(ids, chunk), runner.run(ids, 75))


@both
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_schedules_with_batch_mates_change_no_bit(
    get_tiny: GetTiny, family: Family, layout: Layout, seed: int
) -> None:
    prompts = [prompt(n, seed=20 + n) for n in (5, 31, 64, 90, 47, 8)]
    runner = runner_of(get_tiny(family, layout).folder, seed=seed)
    check_random_schedules(runner, prompts, [1, 1, 2, 4, 9, 33], seed)


@both
def test_thirty_two_decodes_together_equal_each_alone(
    get_tiny: GetTiny, family: Family, layout: Layout
) -> None:
    runner = runner_of(get_tiny(family, layout).folder)
    prompts = [prompt(4 + i % 9, seed=60 + i) for i in range(32)]
    lives = [Live() for _ in prompts]
    runner.step([Part(live, ids[:-2]) for live, ids in zip(lives, prompts, strict=True)])
    runner.step([Part(live, ids[-2:-1]) for live, ids in zip(lives, prompts, strict=True)])
    parts = [Part(live, ids[-1:]) for live, ids in zip(lives, prompts, strict=True)]
    together = runner.step(parts)[0]
    for live in lives:
        runner.release(live)
    for ids, logits in zip(prompts, together, strict=True):
        assert torch.equal(runner.run(ids, len(ids))[-1:], logits)


@both
def test_snapshots_in_mid_chunk_continue_with_the_same_bits(
    get_tiny: GetTiny, family: Family, layout: Layout
) -> None:
    """A second sequence shares pages of the first up to a boundary and starts from its snapshot."""
    runner = runner_of(get_tiny(family, layout).folder, seed=3)
    ids = prompt(90, seed=31)
    expected = runner.run(ids, 90)
    first = Live()
    mate = Live()
    parts = [Part(mate, prompt(9, seed=1)), Part(first, ids[:80], snapshots=[15, 63])]
    _, slots = runner.step(parts)
    restored = runner.fork(first, ids[:64], slots[1][1])
    found = torch.cat(
        [runner.step([Part(restored, ids[i : i + 5])])[0][0] for i in range(64, 90, 5)]
    )
    assert torch.equal(found, expected[64:])


@both
def test_restored_state_follows_the_tokens_not_the_draft(
    get_tiny: GetTiny, family: Family, layout: Layout
) -> None:
    """Verification: states after every draft token; going on from the second drops the rest."""
    runner = runner_of(get_tiny(family, layout).folder, seed=4)
    ids = prompt(60, seed=33)
    expected = runner.run(ids, 60)
    live = Live()
    runner.step([Part(live, ids[:40])])
    wrong = [*ids[40:42], 9, 10]
    verified, slots = runner.step([Part(live, wrong, snapshots=[0, 1, 2])])
    assert torch.equal(verified[0][:2], expected[40:42])
    live.ids = ids[:42]
    live.slot = slots[0][1]
    rest = torch.cat([runner.step([Part(live, [t])])[0][0] for t in ids[42:]])
    assert torch.equal(rest, expected[42:])


def test_two_threads_change_no_bit_of_row_independence(get_tiny: GetTiny) -> None:
    torch.set_num_threads(2)
    runner = runner_of(get_tiny("qwen4_exp", "fp8").folder)
    ids = prompt(24, seed=12)
    assert torch.equal(runner.run(ids, 7), runner.run(ids, 24))


def test_a_runner_notices_reads_of_unwritten_memory(get_tiny: GetTiny) -> None:
    """The harness itself: a sequence that claims a state it never wrote gives NaN."""
    runner: Runner = runner_of(get_tiny("qwen3_5", "bf16").folder)
    live = Live(slot=runner.free_slots.pop())
    assert runner.step([Part(live, prompt(8, seed=1))])[0][0].isnan().any()
