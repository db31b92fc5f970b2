"""The part of docs/kernels.md that says what stands in the way of the rows below their mark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

HEAD = """## What stands in the way

Counters of Nsight Compute for the kernels of the rows that miss their mark: one call with empty
caches, so that times are above those of the tables. In percent of the peak: **issue** slots,
**tensor** cores (of the card's own matrix instructions; those of Ampere reach 60 % of it on a
Hopper card), **memory**, **L2**, **L1** and shared memory, and resident **warps** while a
multiprocessor works. **waits**: warps that wait for each issued instruction, by reason.
**reading**: "few blocks" has no more than one block a multiprocessor, and its time is a chain of
latencies; a unit above 60 %, or the tensor cores above 36 %, is the limit; else too few warps are
resident to hide what they wait for.

"""
COLUMNS = (
    "operation", "case", "kernel", "us", "blocks x threads", "registers", "shared KiB", "issue",
    "tensor", "memory", "L2", "L1", "warps", "waits", "reading",
)  # fmt: skip
BUSY = 60.0
UNITS = {"issue": "issue slots", "memory": "memory", "l2": "L2", "l1": "shared memory and L1"}
TENSOR_BUSY = 36.0


def table(profile: dict[str, Any]) -> str:
    """`profile`: JSON of `python -m kernels.bench --profile`."""
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    processors = profile["multiprocessors"]
    lines += [list(_cells(row, kernel, processors)) for row, kernel in _kernels(profile["rows"])]
    title = f"{profile['card']}, {profile['path']}: `{profile['command']}`"
    return title + "\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n"


def _kernels(rows: Iterable[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """Kernels that take a tenth of their row's time or more."""
    for row in rows:
        kernels = row.get("kernels", [])
        whole = sum(kernel["us"] for kernel in kernels)
        yield from ((row, kernel) for kernel in kernels if kernel["us"] >= whole / 10)


def _cells(row: dict[str, Any], kernel: dict[str, Any], processors: int) -> Iterable[str]:
    launch, percent = kernel["launch"], kernel["percent"]
    yield from (row["operation"], row["case"], kernel["kernel"], f"{kernel['us']:.1f}")
    yield f"{launch['blocks']} x {launch['threads']}"
    yield from (str(launch["registers"]), f"{launch['shared'] / 1024:.0f}")
    yield from (f"{value:.0f}" for value in percent.values())
    yield ", ".join(f"{name} {warps:.1f}" for name, warps in kernel["waits"].items())
    yield reading(kernel, processors)


def reading(kernel: dict[str, Any], processors: int) -> str:
    """What limits a kernel on a card of so many multiprocessors, by its counters."""
    if kernel["launch"]["blocks"] <= processors:
        return "few blocks"
    percent = kernel["percent"]
    busy = [name for key, name in UNITS.items() if percent[key] >= BUSY]
    busy += ["tensor cores"] if percent["tensor"] >= TENSOR_BUSY else []
    return ", ".join(busy) or f"latency: {max(kernel['waits'], key=kernel['waits'].__getitem__)}"
