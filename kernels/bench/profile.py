"""Hardware counters of every case's kernels by Nsight Compute: what stands in a slow one's way."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MARKER = "spin_kernel"
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
NOT_STALLED = {"selected", "not_selected"}
PERCENT = {
    "issue": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
NUMBERS = {
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
    "registers": "launch__registers_per_thread",
    "shared": "launch__shared_mem_per_block",
}
TIME = "gpu__time_duration.sum"
COMMAND = (
    "ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw",
    "--section", "WarpStateStats", "--section", "LaunchStats",
    "--metrics", ",".join([TIME, *PERCENT.values()]),
)  # fmt: skip


def profile(cases: list[list[str]]) -> list[dict[str, Any]]:
    """One row for each [operation, name] of `cases`: its kernels in the order of their start, each
    with microseconds, launch, percent of the peak of what it uses, and the two main reasons why
    its warps wait. Caches are empty at the start of each. Raises FileNotFoundError without ncu.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        child = subprocess.run(
            [*COMMAND, "--log-file", log, sys.executable, "-m", "kernels.bench.profiled"],
            input=json.dumps(cases), stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        return rows(child.stdout, log.read_text())


def rows(cases: str, counters: str) -> list[dict[str, Any]]:
    """`cases`: what kernels.bench.profiled printed. `counters`: the raw page of ncu as CSV."""
    launches = _by_case(_kernels(counters))
    names = [json.loads(line) for line in cases.splitlines() if line.startswith("{")]
    return [name if "refused" in name else name | {"kernels": next(launches)} for name in names]


def _kernels(counters: str) -> Iterator[dict[str, str]]:
    """Column name to value of every launch."""
    table = csv.DictReader(line for line in counters.splitlines() if line.startswith('"'))
    yield from (row for row in table if row["ID"])


def _by_case(kernels: Iterable[dict[str, str]]) -> Iterator[list[dict[str, Any]]]:
    """The launches between two markers belong to one case."""
    found: list[dict[str, Any]] | None = None
    for kernel in kernels:
        if MARKER not in kernel["Kernel Name"]:
            assert found is not None, "a launch before the first marker"
            found.append(_figures(kernel))
            continue
        if found is not None:
            yield found
        found = []
    if found is not None:
        yield found


def _figures(kernel: dict[str, str]) -> dict[str, Any]:
    name = kernel["Kernel Name"].split("<")[0].split("(")[0].removeprefix("void ")
    return {
        "kernel": name,
        "us": _number(kernel[TIME]) / 1e3,
        "percent": {key: _number(kernel[metric]) for key, metric in PERCENT.items()},
        "launch": {key: int(_number(kernel[metric])) for key, metric in NUMBERS.items()},
        "waits": _waits(kernel),
    }


def _waits(kernel: dict[str, str]) -> dict[str, float]:
    """The two reasons with the most warps waiting for each issued instruction."""
    reasons = {
        match[1].replace("_", " "): _number(value)
        for name, value in kernel.items()
        if (match := STALL.fullmatch(name)) and match[1] not in NOT_STALLED
    }
    return dict(sorted(reasons.items(), key=lambda reason: -reason[1])[:2])


def _number(text: str) -> float:
    return float(text.replace(",", ""))
