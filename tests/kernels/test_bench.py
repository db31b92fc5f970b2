"""The benchmark's page, its marks and the table of configurations that it makes."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.aot.registry import operations
from kernels.bench import obstacles, profile, report
from kernels.bench.case import Case, Work
from kernels.bench.ceilings import Ceilings
from kernels.bench.marks import Mark, Marks
from kernels.bench.measure import measure
from kernels.bench.select import UNLIMITED, _groups, _merged

TOP = Ceilings(copy_gbs=1000.0, host_gbs=50.0, mma_tflops=100.0, library_tflops=200.0)


def test_the_page_in_the_tree_is_the_one_its_results_make() -> None:
    assert report.PAGE.read_text() == report.page()


def measured(case: str, rows: int, us: float) -> dict[str, Any]:
    return {"case": case, "rows": rows, "us": us}


def test_the_last_limit_of_rows_and_outputs_is_open() -> None:
    runs = [measured(f"fp8 {n}x4096", m, 1.0) for n in (16384, 4096) for m in (2048, 1)]
    limits = [(rows, outputs) for _, rows, outputs, _ in _groups(runs)]
    assert limits == [(1, 4096), (1, UNLIMITED), (UNLIMITED, 4096), (UNLIMITED, UNLIMITED)]
    assert [rows for _, rows, _, _ in _groups([measured("fp8 4096x4096", 64, 1.0)])] == [64]


def test_a_new_row_takes_the_place_of_that_of_its_range_alone() -> None:
    def row(rows: int, split: int) -> dict[str, Any]:
        return {"weights": "fp8", "rows_up_to": rows, "outputs_up_to": 64, "split": split}

    assert _merged([row(1, 1), row(16, 1)], [row(16, 2), row(4, 2)]) == [
        row(1, 1), row(4, 2), row(16, 2)
    ]  # fmt: skip


def test_candidates_come_fastest_first() -> None:
    runs = [measured("fp8 64x256", 1, us) for us in (3.0, 1.0, 2.0)]
    ((_, _, _, candidates),) = _groups(runs)
    assert [candidate["us"] for candidate in candidates] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("nbytes", "flops", "host_nbytes", "microseconds"),
    [(3e6, 1e6, 0.0, 3.0), (3e6, 1e9, 0.0, 10.0), (3e6, 1e9, 1e6, 20.0)],
    ids=["memory", "products", "host"],
)
def test_the_floor_is_the_slowest_part(
    nbytes: float, flops: float, host_nbytes: float, microseconds: float
) -> None:
    work = Work([], lambda: 0.0, 1.0, nbytes, flops, host_nbytes)
    assert TOP.floor_us(work) == pytest.approx(microseconds)


FRACTION = Mark("fraction", 0.4, 0.6)
QUICK = Mark("fraction", 0.5, us=5.0)


@pytest.mark.parametrize(
    ("mark", "fraction", "us", "verdict"),
    [
        (FRACTION, 0.39, 9.0, "missed"),
        (FRACTION, 0.4, 9.0, "met"),
        (FRACTION, 0.6, 9.0, "good"),
        (Mark("us", 16, 12), 0.1, 16.1, "missed"),
        (Mark("us", 16, 12), 0.1, 16.0, "met"),
        (Mark("us", 16, 12), 0.1, 12.0, "good"),
        (QUICK, 0.1, 5.0, "met"),
        (QUICK, 0.1, 5.1, "missed"),
        (QUICK, 0.9, 9.0, "met"),
    ],
)
def test_a_row_reaches_its_mark(mark: Mark, fraction: float, us: float, verdict: str) -> None:
    assert mark.verdict({"fraction": fraction, "us": us}) == verdict


def test_every_listed_mark_is_of_a_case_and_asks_for_more_where_good() -> None:
    names = [(case.operation, case.name) for m in operations("bench") for case in m.cases()]
    marks = Marks()
    found = {marks.of(*name) for name in names}
    assert len(found) > 15 and Mark("fraction", 0.28, 0.4) in found
    for mark in found - {marks.of("none", "of these")}:
        assert mark.good is not None
        assert (mark.good < mark.must) == (mark.measure == "us")


def row(**figures: Any) -> dict[str, Any]:
    us = {"us": 10.0, "floor_us": 5.0, "fraction": 0.5, "error": 1e-3, "gbs": 500.0, "tflops": 1.0}
    return {"operation": "some", "case": "of it", **us, **figures}


LARGE = {"operation": "quant_linear", "case": "int4 17408x5120 M=64"}  # mark: 42 / 58 %
SMALL = {"operation": "quant_linear", "case": "fp8 4096x4096 M=1"}
PEER = {"us": 12.0, "fraction": 0.58}


@pytest.mark.parametrize(
    ("figures", "cells"),
    [
        ({}, {"rate": "500 GB/s", "%": "50", "reached": "met", "mark": "50 % or 5 us"}),
        ({"tflops": 60.0}, {"rate": "60 TFLOP/s"}),
        ({"host_gbs": 30.0}, {"rate": "30.0 GB/s host"}),
        ({"fraction": 0.4}, {"reached": "missed"}),
        (
            {"peers": {"other": {"us": 15.0}}},
            {"peers": "other 15.0 (1.50)", "served by": "Triton", "reached": "met"},
        ),
        (LARGE | {"peers": {"humming": PEER}}, {"served by": "humming: 12.0 us, good"}),
        (LARGE | {"fraction": 0.41, "peers": {"humming": PEER}}, {"reached": "missed"}),
        (
            LARGE | {"fraction": 0.6, "peers": {"humming": PEER | {"fraction": 0.3}}},
            {"served by": "humming: 12.0 us, missed", "reached": "good"},
        ),
        (LARGE, {"served by": "Triton", "reached": "met"}),
        (SMALL | {"peers": {"humming": PEER}}, {"served by": "Triton"}),
        (
            LARGE | {"peers": {"humming": {"refused": "relative error"}}},
            {"served by": "humming: refused", "reached": "met"},
        ),
        ({"refused": "a | b"}, {"us": "refused: a / b", "reached": "refused"}),
    ],
    ids=[
        "memory",
        "products",
        "host",
        "slow",
        "peer",
        "served",
        "served, ours slow",
        "ours, served slow",
        "not installed",
        "small",
        "served wrong",
        "wrong",
    ],
)
def test_cells_of_a_row(figures: dict[str, Any], cells: dict[str, str]) -> None:
    found = report._cells(row(**figures), TOP.as_dict(), Marks())
    assert {name: found[name] for name in cells} == cells


def refusing() -> Work:
    raise ValueError("no room")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Work([], lambda: 0.2, 0.1, 1.0, 1.0), "relative error 2.0e-01"),
        (lambda: Work([], lambda: float("nan"), 0.1, 1.0, 1.0), "relative error nan"),
        (refusing, "ValueError: no room"),
    ],
)
def test_a_wrong_or_failing_case_gets_no_figures(make: Any, reason: str) -> None:
    cases = [Case("some", "case", make, {"other": make, "not installed": lambda: None})]
    (found,) = measure(cases, TOP, peers=True)
    assert reason in found["refused"] and "us" not in found
    assert list(found["peers"]) == ["other"] and reason in found["peers"]["other"]["refused"]


def counters(*kernels: tuple[str, str, str]) -> str:
    """The raw page of ncu: notes, names, units, then a line for each (kernel, blocks, ns)."""
    stalls = [f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS]
    numbers = [*profile.PERCENT.values(), *profile.NUMBERS.values(), profile.TIME]
    columns = ["ID", "Kernel Name", *numbers, *stalls]
    lines = [columns, [""] * len(columns)]
    for place, (kernel, blocks, ns) in enumerate(kernels):
        values = {
            profile.NUMBERS["blocks"]: blocks,
            profile.TIME: ns,
            profile.PERCENT["l1"]: "71.5",
        }
        waits = [f"{value}" for value in STALLS.values()]
        lines.append([str(place), kernel, *(values.get(name, "8") for name in numbers), *waits])
    quoted = (",".join(f'"{cell}"' for cell in line) for line in lines)
    return "==PROF== Connected\n" + "\n".join(quoted) + "\n"


STALLS = {"wait": 1.5, "selected": 9.0, "long_scoreboard": 2.5, "barrier": 0.5}
MARKER = ("at::<unnamed>::spin_kernel(long)", "1", "1,500")


def test_kernels_between_two_markers_belong_to_one_case() -> None:
    printed = 'ceilings\n{"operation": "a", "case": "x"}\n{"operation": "b", "case": "y"}\n'
    page = counters(
        MARKER, ("first", "12", "1,250"), ("void second<int>(long)", "1,024", "7"), MARKER
    )
    one, two = profile.rows(printed, page)
    assert [(kernel["kernel"], kernel["us"]) for kernel in one["kernels"]] == [
        ("first", 1.25), ("second", 0.007)
    ]  # fmt: skip
    assert one["kernels"][1]["launch"] == {
        "blocks": 1024,
        "threads": 8,
        "registers": 8,
        "shared": 8,
    }
    assert one["kernels"][0]["waits"] == {"long scoreboard": 2.5, "wait": 1.5}
    assert two == {"operation": "b", "case": "y", "kernels": []}


def test_a_case_that_does_not_run_has_no_kernels_and_takes_none() -> None:
    printed = (
        '{"operation": "a", "case": "x", "refused": "too large"}\n{"operation": "b", "case": "y"}'
    )
    refused, row = profile.rows(printed, counters(MARKER, ("only", "3", "1")))
    assert "kernels" not in refused and [kernel["kernel"] for kernel in row["kernels"]] == ["only"]


@pytest.mark.parametrize(
    ("blocks", "percent", "expected"),
    [
        (132, {"l1": 90.0}, "few blocks"),
        (133, {"l1": 90.0, "memory": 61.0}, "memory, shared memory and L1"),
        (133, {"tensor": 40.0}, "tensor cores"),
        (133, {}, "latency: barrier"),
    ],
)
def test_the_reading_names_the_unit_that_is_busy_or_what_warps_wait_for(
    blocks: int, percent: dict[str, float], expected: str
) -> None:
    kernel = {
        "launch": {"blocks": blocks},
        "percent": dict.fromkeys(profile.PERCENT, 10.0) | percent,
        "waits": {"wait": 1.0, "barrier": 3.0},
    }
    assert obstacles.reading(kernel, 132) == expected


def test_only_rows_below_their_mark_are_profiled() -> None:
    rows = [
        {"operation": "rotary", "case": case, "us": us, "fraction": 0.4, "tflops": 0.0}
        for case, us in (("slow", 5.5), ("quick", 4.5))
    ]
    rows.append({"operation": "rotary", "case": "wrong", "refused": "relative error"})
    assert report.missed({"rows": rows}) == [["rotary", "slow"]]
