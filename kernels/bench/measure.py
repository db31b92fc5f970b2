"""Rows of the benchmark: each case checked, then timed, beside its peers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from kernels.aot.registry import operations
from kernels.bench.case import Case, Work
from kernels.bench.ceilings import Ceilings
from kernels.bench.timing import time_calls


def all_cases(only: str = "") -> Iterator[Case]:
    """The cases of all operations whose "operation name" contains `only`."""
    for module in operations("bench"):
        yield from (case for case in module.cases() if only in f"{case.operation} {case.name}")


def measure(cases: Iterable[Case], ceilings: Ceilings, *, peers: bool) -> list[dict[str, Any]]:
    """One row a case. A wrong or failing one gets no figures but "refused", which says why."""
    rows = []
    for case in cases:
        row: dict[str, Any] = {"operation": case.operation, "case": case.name}
        row |= _measured(case.make(), ceilings)
        if peers:
            row["peers"] = _peers(case, ceilings)
        print(json.dumps(row), flush=True)
        rows.append(row)
        torch.cuda.empty_cache()
    return rows


def _peers(case: Case, ceilings: Ceilings) -> dict[str, Any]:
    works = ((name, make()) for name, make in case.peers.items())
    return {name: _measured(work, ceilings) for name, work in works if work is not None}


def _measured(work: Work, ceilings: Ceilings) -> dict[str, Any]:
    try:
        error = work.error()
        if not error <= work.bound:
            return {"refused": f"relative error {error:.1e}, allowed {work.bound:.1e}"}
        time = time_calls(work.calls)
    except Exception as failure:  # does not compile or fit: the other rows go on
        return {"refused": f"{type(failure).__name__}: {str(failure)[:200]}"}
    floor = ceilings.floor_us(work.nbytes, work.flops)
    return {
        "us": time.microseconds, "spread": time.spread, "error": error, "floor_us": floor,
        "fraction": floor / time.microseconds, "gbs": work.nbytes / time.microseconds / 1e3,
        "tflops": work.flops / time.microseconds / 1e6,
    }  # fmt: skip
