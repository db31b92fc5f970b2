"""Checks that a token's logits are the same bits whatever runs beside it, for any family."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from tests.models.runner import Live, Part, Runner


def check_random_schedules(
    runner: Runner, prompts: Sequence[list[int]], cuts: Sequence[int], seed: int
) -> None:
    """Sequences of odd lengths, cut at random, packed in random order with random company."""
    rng = random.Random(seed)
    alone = [runner.run(ids, len(ids)) for ids in prompts]
    lives = [Live() for _ in prompts]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    while waiting := [i for i, live in enumerate(lives) if len(live.ids) < len(prompts[i])]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        parts = []
        for i in chosen:
            rest = prompts[i][len(lives[i].ids) :]
            parts.append(Part(lives[i], rest[: rng.choice(cuts)]))
        for i, logits in zip(chosen, runner.step(parts)[0], strict=True):
            found[i].append(logits)
    for rows, whole in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(rows), whole)


def check_joint_decodes(runner: Runner, prompts: Sequence[list[int]]) -> None:
    """The last token of every prompt in one step gives what it gives alone."""
    lives = [Live() for _ in prompts]
    runner.step([Part(live, ids[:-1]) for live, ids in zip(lives, prompts, strict=True)])
    parts = [Part(live, ids[-1:]) for live, ids in zip(lives, prompts, strict=True)]
    together = runner.step(parts)[0]
    for live in lives:
        runner.release(live)
    for ids, logits in zip(prompts, together, strict=True):
        assert torch.equal(runner.run(ids, len(ids))[-1:], logits)


def check_snapshot(
    runner: Runner, ids: list[int], expected: torch.Tensor, mate: list[int], snapshots: list[int],
    computed: int,
) -> None:  # fmt: skip
    """A second sequence shares pages of the first up to the last snapshot and starts from its
    state; `computed` tokens of the first run in one step, beside a mate."""
    first, boundary = Live(), snapshots[-1] + 1
    parts = [Part(Live(), mate), Part(first, ids[:computed], snapshots=snapshots)]
    _, slots = runner.step(parts)
    restored = runner.fork(first, ids[:boundary], slots[1][-1])
    rest = range(boundary, len(ids), 5)
    found = torch.cat([runner.step([Part(restored, ids[i : i + 5])])[0][0] for i in rest])
    assert torch.equal(found, expected[boundary:])


def check_rejected_drafts(
    runner: Runner, ids: list[int], expected: torch.Tensor, start: int, accepted: int, drafts: int,
    end: int,
) -> None:  # fmt: skip
    """`drafts` tokens from `start` on, `accepted` of them right; then single steps to `end`."""
    live = Live()
    runner.step([Part(live, ids[:start])])
    wrong = [9, 10, 11, 12][: drafts - accepted]
    drafted = [*ids[start : start + accepted], *wrong]
    verified, slots = runner.step([Part(live, drafted, snapshots=range(4))])
    assert torch.equal(verified[0][:accepted], expected[start : start + accepted])
    live.ids = ids[: start + accepted]
    live.slot = slots[0][accepted - 1]
    rest = [runner.step([Part(live, [t])])[0][0] for t in ids[start + accepted : end]]
    assert torch.equal(torch.cat(rest), expected[start + accepted : end])
