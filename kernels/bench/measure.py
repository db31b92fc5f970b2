"""Rows of the benchmark: each case checked, then timed, beside its peers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
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


def measure(cases: Iterable[Case], ceilings: Ceilings, *, peers: bool) -> Iterator[dict[str, Any]]:
    """One row a case. A wrong or failing one gets no figures but "refused", which says why."""
    for case in cases:
        row: dict[str, Any] = {"operation": case.operation, "case": case.name}
        row |= _measured(case.make, ceilings) or {}
        if peers:
            found = {name: _measured(make, ceilings) for name, make in case.peers.items()}
            row["peers"] = {name: figures for name, figures in found.items() if figures}
        print(json.dumps(row), flush=True)
        yield row
        torch.cuda.empty_cache()


def _measured(make: Callable[[], Work | None], ceilings: Ceilings) -> dict[str, Any] | None:
    """None where `make` gives no work."""
    try:
        work = make()
        if work is None:
            return None
        error = work.error()
        if not error <= work.bound:
            return {"refused": f"relative error {error:.1e}, allowed {work.bound:.1e}"}
        time = time_calls(work.calls)
    except Exception as failure:  # does not compile or fit: the other rows go on
        return {"refused": f"{type(failure).__name__}: {str(failure)[:200]}"}
    floor, us = ceilings.floor_us(work), time.microseconds
    figures = {
        "us": us, "spread": time.spread, "error": error, "floor_us": floor, "fraction": floor / us,
        "gbs": work.nbytes / us / 1e3, "tflops": work.flops / us / 1e6,
    }  # fmt: skip
    return figures | ({"host_gbs": work.host_nbytes / us / 1e3} if work.host_nbytes else {})
