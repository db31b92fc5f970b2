"""The benchmark's page and the table of configurations that it makes."""

from __future__ import annotations

from typing import Any

from kernels.bench import report
from kernels.bench.select import UNLIMITED, _groups


def test_the_page_in_the_tree_is_the_one_its_results_make() -> None:
    assert report.PAGE.read_text() == report.page()


def measured(case: str, rows: int, us: float) -> dict[str, Any]:
    return {"case": case, "rows": rows, "us": us}


def test_the_last_limit_of_rows_and_outputs_is_open() -> None:
    runs = [measured(f"fp8 {n}x256", m, 1.0) for n in (512, 64) for m in (16, 1)]
    limits = [(rows, outputs) for _, rows, outputs, _ in _groups(runs)]
    assert limits == [(1, 64), (1, UNLIMITED), (UNLIMITED, 64), (UNLIMITED, UNLIMITED)]


def test_candidates_come_fastest_first() -> None:
    runs = [measured("fp8 64x256", 1, us) for us in (3.0, 1.0, 2.0)]
    ((_, _, _, candidates),) = _groups(runs)
    assert [candidate["us"] for candidate in candidates] == [1.0, 2.0, 3.0]
