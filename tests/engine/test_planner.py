"""The decision of a step, as tables of numbers in and numbers out."""

from __future__ import annotations

from typing import Any

import pytest

from services.engine.scheduler.plan import SequenceId
from services.engine.scheduler.planner import (
    Candidate,
    Decision,
    Grant,
    GroupView,
    PlanView,
    decide,
)

PAGE = 4


def candidate(number: int, *, running: bool = True, **changes: Any) -> Candidate:
    """Rank follows the number; a running one decodes at position 8 with a full table."""
    settings: dict[str, Any] = {
        "sequence": SequenceId(number),
        "rank": (changes.pop("priority", 0), number, 0),
        "running": running,
        "start": 8 if running else 0,
        "tokens": 1 if running else 10,
        "pages": {"kv": 2 if running else 0},
        "in_place": running,
    }
    return Candidate(**(settings | changes))


def view(
    *candidates: Candidate, room: int = 100, slots: int = 100, budget: int = 64, seats: int = 8
) -> PlanView:
    groups = (GroupView("kv", "paged", PAGE, room), GroupView("state", "state", 0, slots))
    return PlanView(groups, candidates, budget, seats)


def grants(decision: Decision) -> dict[int, tuple[int, int]]:
    return {g.sequence: (g.tokens, g.drafts) for g in decision.grants}


CASES = [
    ("nothing to do", view(), {}, []),
    (
        "decode and prefill share the budget, decode first even if it came later",
        view(candidate(0, tokens=50, pages={"kv": 2}), candidate(1), budget=10),
        {0: (9, 0), 1: (1, 0)},
        [],
    ),
    (
        "a prompt is cut at the budget",
        view(candidate(0, running=False, tokens=100), budget=16),
        {0: (16, 0)},
        [],
    ),
    (
        "a prompt is cut at its own limit",
        view(candidate(0, running=False, tokens=100, limit=5), budget=16),
        {0: (5, 0)},
        [],
    ),
    (
        "waiting ones are admitted by rank while seats last",
        view(*(candidate(i, running=False, tokens=2) for i in (2, 1, 0)), seats=2),
        {0: (2, 0), 1: (2, 0)},
        [],
    ),
    (
        "a lower priority number goes first",
        view(
            candidate(0, running=False),
            candidate(1, running=False, priority=-1),
            budget=12,
        ),
        {1: (10, 0), 0: (2, 0)},
        [],
    ),
    (
        "a prompt that does not fit as a whole waits, and so do those behind it",
        view(
            candidate(0),
            candidate(1, running=False, tokens=40),
            candidate(2, running=False, tokens=1),
            room=9,
        ),
        {0: (1, 0)},
        [],
    ),
    (
        "a hit takes its cached pages out of the room",
        view(candidate(0, running=False, start=8, tokens=4, pages={"kv": 2}, claims={"kv": 2})),
        {0: (4, 0)},
        [],
    ),
    (
        "a hit whose pages leave no room waits",
        view(
            candidate(0, running=False, start=8, tokens=4, pages={"kv": 2}, claims={"kv": 2}),
            room=2,
        ),
        {},
        [],
    ),
    (
        "a running prompt takes what fits",
        view(candidate(0, tokens=50), room=3),
        {0: (12, 0)},
        [],
    ),
    (
        "without a page for one token the worst running sequence is preempted",
        view(
            candidate(0, releases={"kv": 2}),
            candidate(1, releases={"kv": 2}),
            candidate(2, releases={"kv": 2}),
            room=0,
        ),
        {0: (1, 0), 1: (1, 0)},
        [2],
    ),
    (
        "the best sequence preempts as many as it needs",
        view(
            candidate(0, releases={"kv": 5}),
            candidate(1, releases={"kv": 0, "state": 1}),
            candidate(2, releases={"kv": 0, "state": 1}),
            room=0,
        ),
        {},
        [2, 1],
    ),
    (
        "equal priorities do not preempt to be admitted",
        view(candidate(0, releases={"kv": 9}), candidate(1, running=False), room=1, seats=1),
        {0: (1, 0)},
        [],
    ),
    (
        "a better priority preempts for a seat",
        view(candidate(0), candidate(1, running=False, priority=-1), seats=0),
        {1: (10, 0)},
        [0],
    ),
    (
        "a better priority preempts for pages",
        view(
            candidate(0, releases={"kv": 3, "state": 1}),
            candidate(1, running=False, priority=-1),
            room=1,
        ),
        {1: (10, 0)},
        [0],
    ),
    (
        "nobody is preempted in vain for a waiting sequence",
        view(
            candidate(0, releases={"kv": 1}),
            candidate(1, running=False, priority=-1, tokens=40),
            room=1,
        ),
        {0: (1, 0)},
        [],
    ),
    (
        "no state slot, no admission",
        view(candidate(0), candidate(1, running=False), slots=0),
        {0: (1, 0)},
        [],
    ),
    (
        "drafts ride along",
        view(candidate(0, drafts=3), candidate(1, drafts=3)),
        {0: (1, 3), 1: (1, 3)},
        [],
    ),
    (
        "drafts leave the tokens of others alone",
        view(candidate(0, drafts=3), candidate(1, drafts=3), budget=4),
        {0: (1, 2), 1: (1, 0)},
        [],
    ),
    (
        "drafts do not preempt",
        view(candidate(0, drafts=3), candidate(1), slots=2),
        {0: (1, 0), 1: (1, 0)},
        [],
    ),
]


@pytest.mark.parametrize(
    ("given", "expected", "preempted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_decision(
    given: PlanView, expected: dict[int, tuple[int, int]], preempted: list[int]
) -> None:
    decision = decide(given)
    assert grants(decision) == expected
    assert list(decision.preempted) == preempted


def test_the_order_of_candidates_does_not_matter() -> None:
    candidates = [candidate(i, releases={"kv": 2}, tokens=1 + i) for i in range(5)]
    forward = decide(view(*candidates, room=1, budget=9))
    assert decide(view(*reversed(candidates), room=1, budget=9)) == forward


def test_shortage_of_memory_is_told_apart_from_shortage_of_budget() -> None:
    assert decide(view(candidate(0), candidate(1), room=1)).short
    assert not decide(view(candidate(0, tokens=99), budget=5)).short


def test_a_hit_shared_with_a_victim_is_counted_once() -> None:
    """The victim's pages go to the hit, so nothing is left for the rest of the prompt."""
    decision = decide(
        view(
            candidate(0, releases={"kv": 2, "state": 1}),
            candidate(
                1,
                running=False,
                priority=-1,
                start=8,
                tokens=4,
                pages={"kv": 2},
                shares={"kv": 2},
            ),
            room=0,
        )
    )
    assert grants(decision) == {}


def test_a_grant_is_plain_data() -> None:
    assert decide(view(candidate(0))).grants == (Grant(SequenceId(0), 1, 0),)
