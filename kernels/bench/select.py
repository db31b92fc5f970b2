"""From measured candidates to the table of tuned configurations."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

from kernels.aot.compile import compile_variant
from kernels.backend import TARGETS
from kernels.quant_linear.bench import ROWS, SHAPES
from kernels.quant_linear.tuning import TABLE, Config, Row
from kernels.quant_linear.variants import LAYOUTS, variant

UNLIMITED = 2**31 - 1
FOUND = (
    "fastest candidate of `python -m kernels.bench --tune` on {card}, {path}, that compiles for "
    "this target without spills in its hot loop and within its shared memory"
)


def write_table(results: Path) -> None:
    """Put the output of --tune into tuned.json; compiles for every target, needs no card.

    Rows for what was not measured stay.
    """
    measured = json.loads(results.read_text())
    old = json.loads(TABLE.read_text())["targets"]
    found = FOUND.format(card=measured["card"], path=measured["path"])
    jobs = [(target, measured["rows"]) for target in TARGETS]
    # One process a target: Triton 3.6 keeps casts of the first target that it compiles for.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(len(jobs), os.cpu_count() or 1), mp_context=context, max_tasks_per_child=1
    ) as pool:
        tables = list(pool.map(_rows_of, jobs))
    targets = {
        f"sm{target}": {"found": found, "rows": _merged(old[f"sm{target}"]["rows"], rows)}
        for target, rows in zip(TARGETS, tables, strict=True)
    }
    TABLE.write_text(json.dumps({"targets": targets}, indent=1) + "\n")


def _merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows in the table's order; of two for the same range the new one."""
    ranges = {_range(row): row for row in (*old, *new)}
    return [ranges[key] for key in sorted(ranges)]


def _range(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["weights"], row["rows_up_to"], row["outputs_up_to"]


def _rows_of(job: tuple[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    target, measured = job
    return [_fitting(target, *group) for group in _groups(measured)]


def _groups(
    measured: list[dict[str, Any]],
) -> Iterator[tuple[str, int, int, list[dict[str, Any]]]]:
    """(format, rows up to, outputs up to, candidates fastest first), in the table's order."""
    keys = {
        (m["case"].split()[0], m["rows"], int(m["case"].split()[1].split("x")[0])) for m in measured
    }
    for weights, rows, outputs in sorted(keys):
        last_rows = rows == max(ROWS)
        last_outputs = outputs == max(n for w, n, _ in SHAPES if w == weights)
        name = f"{weights} {outputs}x"
        chosen = [m for m in measured if m["case"].startswith(name) and m["rows"] == rows]
        yield (
            weights,
            UNLIMITED if last_rows else rows,
            UNLIMITED if last_outputs else outputs,
            sorted(chosen, key=lambda m: m["us"]),
        )


def _fitting(
    target: int, weights: str, rows: int, outputs: int, candidates: list[dict[str, Any]]
) -> dict[str, Any]:
    names = [field.name for field in fields(Config)]
    layouts = [layout for layout in LAYOUTS if layout.name == weights]
    for candidate in candidates:
        values = {name: candidate[name] for name in names}
        row = Row(weights, rows, outputs, Config(**values))
        if not any(
            compile_variant(variant(layout, row.config), target).problem for layout in layouts
        ):
            limits = {"weights": weights, "rows_up_to": rows, "outputs_up_to": outputs}
            return limits | values
    raise RuntimeError(f"no candidate for {weights}, {rows} rows fits sm{target}")
