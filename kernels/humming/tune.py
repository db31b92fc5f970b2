"""Tries other tiles where humming's own choice is weak, on the card at hand.

Each candidate is compiled, checked against fp64 and timed from a CUDA graph over rotating weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.bench.timing import time_calls
from kernels.humming import launch, runtime
from kernels.humming.build import Built, compile_all
from kernels.humming.cards import Card
from kernels.humming.forms import FORMS, StoredMatrix
from kernels.humming.matrix import HummingMatrix, KernelTable
from kernels.humming.plan import TABLE, Planned, own_choice, planned, rows_of
from kernels.humming.repack import repack
from kernels.humming.samples import random_weights
from kernels.humming.shapes import Shape
from kernels.quant_linear.reference import dequantize

DEVICE = torch.device("cuda", 0)
MAX_ERROR = 6e-3
CHECKED_ROWS = 16
ROTATED_BYTES = 240_000_000
MANY_ROUTES = 32
GRAPH_US, ROUNDS = 6_000.0, 5

Tile = tuple[tuple[int, int, int], tuple[int, int, int], int, int]
# Block, warp, stages, blocks of a multiprocessor: for 32 to 64 rows of an expert.
SOME_ROWS: tuple[Tile, ...] = (
    ((48, 256, 64), (48, 32, 64), 4, 1), ((48, 256, 64), (48, 64, 32), 4, 1),
    ((48, 128, 64), (48, 32, 64), 3, 2), ((48, 128, 64), (48, 32, 32), 4, 1),
    ((64, 256, 64), (32, 64, 64), 4, 1), ((64, 256, 64), (64, 32, 64), 4, 1),
    ((64, 256, 64), (64, 64, 32), 4, 1), ((64, 128, 64), (64, 32, 64), 3, 2),
    ((64, 128, 64), (32, 64, 64), 3, 2), ((64, 128, 128), (64, 32, 64), 3, 1),
    ((64, 128, 64), (32, 32, 64), 4, 1), ((32, 128, 64), (32, 32, 64), 4, 2),
    ((32, 256, 128), (32, 64, 64), 4, 1),
)  # fmt: skip
FEW_ROWS: tuple[Tile, ...] = (
    ((8, 256, 64), (8, 64, 32), 5, 1), ((8, 128, 128), (8, 64, 32), 5, 1),
    ((8, 128, 64), (8, 32, 64), 4, 2), ((8, 128, 64), (8, 64, 32), 5, 2),
    ((8, 64, 128), (8, 64, 32), 4, 2), ((8, 256, 32), (8, 64, 32), 5, 2),
    ((8, 256, 128), (8, 64, 64), 4, 1), ((8, 64, 64), (8, 32, 32), 4, 2),
)  # fmt: skip
DENSE_64: tuple[Tile, ...] = (
    ((64, 128, 64), (64, 32, 64), 3, 2), ((64, 128, 64), (32, 64, 32), 4, 1),
    ((64, 64, 128), (64, 32, 64), 3, 2), ((64, 64, 64), (32, 32, 64), 4, 2),
    ((64, 64, 128), (32, 32, 64), 4, 1), ((32, 128, 64), (32, 32, 64), 4, 2),
    ((32, 64, 128), (32, 32, 64), 4, 2), ((64, 128, 128), (64, 32, 64), 3, 1),
    ((64, 256, 64), (64, 32, 64), 4, 1), ((64, 64, 128), (64, 32, 32), 3, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A shape, its range of rows (see plan.LIMITS) and the tiles that are tried there."""

    shape: Shape
    limit: float
    sample: float
    tiles: tuple[Tile, ...]

    @property
    def name(self) -> str:
        return " ".join(map(str, (*self.shape.key, self.limit)))


def cases() -> Iterator[Case]:
    """Where peers or other tiles were faster: kernels/humming/README.md."""
    experts = (
        Shape("stack", "mxfp4", 4096, 4096, 256), Shape("stack", "mxfp4", 4096, 2048, 256),
        Shape("stack", "int4-g128", 1280, 2560, 512), Shape("stack", "int4-g128", 2560, 640, 512),
    )  # fmt: skip
    for shape in experts:
        yield Case(shape, 64, 48, SOME_ROWS)
    for limit, sample in ((0.05, 0.0235), (7, 1.5)):
        yield Case(experts[-1], limit, sample, FEW_ROWS)
    for form, n, k in (
        ("fp8-b128", 4096, 4096), ("fp8-b128", 16384, 4096), ("int4-g128", 17408, 5120),
        ("int4-g128", 5120, 17408),
    ):  # fmt: skip
        yield Case(Shape("dense", form, n, k), 64, 64, DENSE_64)


def candidates(case: Case) -> list[Planned]:
    """humming's own choice first; every tile with and without a split of K between programs."""
    own = own_choice(case.shape, case.sample)
    found = [planned(case.shape, case.limit, own)]
    for block, warp, stages, blocks in case.tiles:
        for split in (True, False):
            tile = own | {
                "block_shape": list(block), "warp_shape": list(warp), "num_stages": stages,
                "num_ctas_per_sm": blocks, "use_stream_k": split,
            }  # fmt: skip
            if tile != own:
                found.append(planned(case.shape, case.limit, tile))
    return found


def tune(arguments: argparse.Namespace, card: Card) -> int:
    """Measure, print, and with --write put tiles that beat humming's choice into tiles.json."""
    chosen = [case for case in cases() if arguments.only in case.name]
    plans = {case: candidates(case) for case in chosen}
    kernels = [kernel for found in plans.values() for kernel in found]
    built = compile_all(kernels, card, arguments.workers)
    runtime.load_launcher()
    torch.manual_seed(0)
    rows = [row for case, found in plans.items() for row in _measure(case, found, built)]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.write:
        write(TABLE, card.name, torch.cuda.get_device_name(), best(rows))
    return 0


def _measure(
    case: Case, found: Sequence[Planned], built: dict[str, Built]
) -> Iterator[dict[str, Any]]:
    shape = case.shape
    stored = _weights(shape)
    work = _Work(case, stored)
    for index, kernel in enumerate(found):
        made = built[kernel.key]
        row = {"case": case.name, "shape": [*shape.key, case.limit], "own": index == 0}
        row |= {"tile": kernel.tile} | work.figures(kernel, made)
        print(json.dumps(row), flush=True)
        yield row
    del work
    torch.cuda.empty_cache()


def _weights(shape: Shape) -> list[StoredMatrix]:
    first = random_weights(shape.form, shape.n, shape.k, shape.experts, "cuda")
    count = max(1, -(-ROTATED_BYTES // first.nbytes))
    more = (
        random_weights(shape.form, shape.n, shape.k, shape.experts, "cuda")
        for _ in range(count - 1)
    )
    return [first, *more]


class _Work:
    """The weights, the rows and the routes of a case on the card; its candidates share them."""

    def __init__(self, case: Case, stored: Sequence[StoredMatrix]) -> None:
        shape = case.shape
        form = FORMS[shape.form]
        empty = KernelTable(shape.form, shape.n, shape.k, shape.gemm == "stack", (), ())
        self.case = case
        self.matrices = [
            HummingMatrix(*repack(matrix, form), runtime.new_locks(DEVICE), empty)
            for matrix in stored
        ]
        self.rows = rows_of(shape, case.sample)
        self.x = torch.randn(self.rows, shape.k, device="cuda").bfloat16()
        self.out = torch.empty(self.rows, shape.n, dtype=torch.bfloat16, device="cuda")
        # Few rows reach few experts: other routes, so that no cache holds all that is read.
        count = MANY_ROUTES if shape.experts and self.rows < shape.experts else 1
        self.routes = [
            torch.randint(max(shape.experts, 1), (self.rows, 1), device="cuda")
            for _ in range(count)
        ]
        self.exact = self._exact(stored[0])

    def _exact(self, stored: StoredMatrix) -> torch.Tensor:
        """fp64 of the first rows."""
        if not self.case.shape.experts:
            return self.x[:CHECKED_ROWS].double() @ dequantize(stored).double().mT
        rows = range(min(CHECKED_ROWS, self.rows))
        found = [
            dequantize(stored.expert(int(self.routes[0][row]))).double() @ self.x[row].double()
            for row in rows
        ]
        return torch.stack(found)

    def figures(self, kernel: Planned, made: Built) -> dict[str, Any]:
        """Microseconds and relative error, or what is wrong."""
        if made.path is None:
            return {"problem": made.problem}
        block_m = kernel.tile["block_shape"][0]
        experts = self.case.shape.experts
        orders: list[Any] = [(None, None, None)]
        if experts:
            orders = [launch.align(ids, 0, experts, block_m).tensors for ids in self.routes]
        try:
            ready, _ = runtime.register(made.path, block_m, DEVICE)
            calls = [
                partial(runtime.launch, matrix, ready, self.x, self.out, order)
                for matrix in self.matrices
                for order in orders
            ]
            self.out.fill_(torch.nan)
            calls[0]()
            error = self._error()
            if not error < MAX_ERROR:
                return {"problem": f"relative error {error:.1e}"}
            time = time_calls(calls, GRAPH_US, ROUNDS)
        except RuntimeError as failure:  # does not fit the card: the others go on
            return {"problem": str(failure)[:200]}
        return {"us": time.microseconds, "spread": time.spread, "error": error}

    def _error(self) -> float:
        if bool(self.out.isnan().any()):
            return float("inf")
        found = self.out[: len(self.exact)].double()
        return float((found - self.exact).norm() / self.exact.norm())


def best(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case the fastest row, where it is not humming's own choice."""
    found = []
    for case in dict.fromkeys(row["case"] for row in rows):
        timed = [row for row in rows if row["case"] == case and "us" in row]
        own = next((row["us"] for row in timed if row["own"]), None)
        first = min(timed, key=lambda row: row["us"], default=None)
        if first is not None and not first["own"]:
            figures = {"us": round(first["us"], 1), "own_us": own and round(own, 1)}
            found.append({"shape": first["shape"], "tile": first["tile"]} | figures)
    return found


def write(path: Path, card: str, measured_on: str, rows: list[dict[str, Any]]) -> None:
    """Put rows into the table of a card, in place of those of the same shape and range."""
    table = json.loads(path.read_text())
    new = [row | {"measured_on": measured_on} for row in rows]
    shapes = [row["shape"] for row in rows]
    kept = [row for row in table["cards"].get(card, []) if row["shape"] not in shapes]
    table["cards"][card] = kept + new
    table["found"] = "python -m kernels.humming tune --write: fastest candidate, error checked"
    path.write_text(json.dumps(table, indent=1) + "\n")
