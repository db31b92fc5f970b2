"""Plans are data: a recorded run is reproduced exactly."""

from __future__ import annotations

import json

from tests.engine.replay import GOLDEN, record


def test_the_recorded_plans_are_reproduced() -> None:
    expected = GOLDEN.read_text().splitlines()
    got = record()
    for number, (new, old) in enumerate(zip(got, expected, strict=False), 1):
        assert json.loads(new) == json.loads(old), f"plan {number} differs"
    assert len(got) == len(expected)


def test_the_recorded_run_has_everything_in_it() -> None:
    plans = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    steps = [s for p in plans for s in p["sequences"]]
    begins = [s["sequence"] for s in steps if s["begin"]]
    assert len(begins) > len(set(begins)), "no preemption"
    assert any(s["start"] > 0 for s in steps if s["begin"]), "no hit"
    assert any(len(s["token_ids"]) > 1 and s["sample_from"] is None for s in steps), "no chunk"
    assert any(len(s["state_writes"]["state"]) > 1 for s in steps), "no snapshot in mid-chunk"
    assert any(s["freed_pages"].get("win") for s in steps), "no page left a window"
    assert any(len(p["sequences"]) == 3 for p in plans) and any(p["ended"] for p in plans)
