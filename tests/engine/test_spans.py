"""Spans that are computed in one step, in the decision of a step: numbers in, numbers out."""

from __future__ import annotations

import pytest

from services.engine.scheduler.planner import Candidate, PlanView, decide
from services.engine.scheduler.spans import AtomicSpans
from tests.engine.test_planner import candidate, grants, view

SPANS = AtomicSpans(((10, 30), (30, 34), (50, 51)))


@pytest.mark.parametrize(
    ("position", "cut", "least"),
    [
        (0, 0, 1), (8, 8, 1), (9, 9, 1), (10, 10, 20), (11, 10, 19), (29, 10, 1), (30, 30, 4),
        (33, 30, 1), (34, 34, 1), (50, 50, 1), (51, 51, 1), (90, 90, 1),
    ],
)  # fmt: skip
def test_cuts_and_least_steps(position: int, cut: int, least: int) -> None:
    assert (SPANS.cut(position), SPANS.least(position)) == (cut, least)


def prefill(number: int, start: int, tokens: int, **changes: object) -> Candidate:
    pages = {"kv": -(-start // 4)}
    return candidate(number, start=start, tokens=tokens, pages=pages, spans=SPANS, **changes)


CASES = [
    ("a chunk stops in front of a span that does not fit", view(prefill(0, 4, 60), budget=20), 6),
    ("a chunk holds a span that fits", view(prefill(0, 4, 60), budget=26), 26),
    ("a chunk does not end within the next span", view(prefill(0, 4, 60), budget=28), 26),
    ("a span is granted whole", view(prefill(0, 10, 60), budget=20), 20),
    ("a span is not begun with a smaller budget", view(prefill(0, 10, 60), budget=19), None),
    ("a limit makes room for a span", view(prefill(0, 10, 60, limit=8), budget=64), 20),
    ("a limit stops in front of a span", view(prefill(0, 4, 60, limit=8), budget=64), 6),
    ("memory for a part of a span gives none of it", view(prefill(0, 10, 60), room=4), None),
    ("memory for a span gives all of it", view(prefill(0, 10, 60), room=5), 20),
    ("a waiting prompt stops in front of a span",
     view(prefill(0, 0, 60, running=False), budget=20), 10),
    ("a waiting prompt that begins with a span waits for its budget",
     view(prefill(0, 10, 60, running=False), budget=19), None),
    ("a waiting prompt begins with a span", view(prefill(0, 10, 60, running=False), budget=21), 20),
]  # fmt: skip


@pytest.mark.parametrize(("what", "given", "tokens"), CASES, ids=[c[0] for c in CASES])
def test_grants(what: str, given: PlanView, tokens: int | None) -> None:
    assert grants(decide(given)) == ({} if tokens is None else {0: (tokens, 0)})


def test_a_span_takes_the_tokens_of_worse_decoders_for_its_turn() -> None:
    """Else a full house of short answers could hold a picture back for ever."""
    decoders = [candidate(i) for i in (1, 2, 3)]
    decision = decide(view(prefill(0, 10, 60), *decoders, budget=21))
    assert grants(decision) == {0: (20, 0), 1: (1, 0)}
    better = [candidate(i, priority=-1) for i in (1, 2, 3)]
    decision = decide(view(prefill(0, 10, 60), *better, budget=21))
    assert grants(decision) == {1: (1, 0), 2: (1, 0), 3: (1, 0)}


def test_a_span_without_memory_preempts_the_worst_sequence() -> None:
    worst = candidate(1, releases={"kv": 2})
    decision = decide(view(prefill(0, 10, 60), worst, room=3))
    assert (grants(decision), decision.preempted) == ({0: (20, 0)}, (1,))
