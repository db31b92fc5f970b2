"""Search for configurations: candidates measured on the shapes of the benchmark."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch

from kernels.bench.linear_cases import Case, checked, dense_of, prepared, random_matrix, rotation
from kernels.bench.timing import time_calls
from kernels.quant_linear.launch import QuantMatrix, Workspace, quant_linear, workspace_need
from kernels.quant_linear.tuning import Config

GRAPH_US, ROUNDS = 2_000.0, 5
WARM_SHAPE = (256, 4096)


def candidates(weights: str, rows: int) -> Iterator[Config]:
    """Configurations worth measuring; those that a card refuses fall out."""
    full = 128 if weights == "fp8" else 64
    if rows == 1:
        # Warps side by side along K, each on 512 bytes of a row.
        tiles = ((1, 8), (1, 16), (2, 8), (4, 4), (4, 8))
        for (warps, block_n), split, stages in product(tiles, (1, 2, 4), (1, 3, 4)):
            yield Config("vector", block_n, 512 * warps, warps, stages=stages, split=split)
    elif rows <= 16:
        for block_n, stages, split in product((32, 64, 128), (3, 4), (1, 2, 4, 8)):
            yield Config("matrix", block_n, full, 4, 16, stages, split)
    elif rows <= 64:
        for block_n, block_m, split in product((64, 128), (32, 64), (1, 2, 4)):
            yield Config("matrix", block_n, full, 4, block_m, 3, split)
            yield Config("matrix", block_n, full // 2, 4, block_m, 4, split, True)
    else:
        # A quarter of a group leaves registers for the largest tiles.
        large = ((64, 128, 4, 2), (128, 128, 4, 4), (128, 256, 8, 4), (256, 128, 8, 4))
        for (block_m, block_n, warps, part), stages in product(large, (3, 4)):
            yield Config("matrix", block_n, full // part, warps, block_m, stages, 1, True)
        yield Config("matrix", 128, full // 2, 4, 64, 3)


def _precompile(job: tuple[str, int, Config]) -> str:
    """Launch once on small tensors: what compiles stays in Triton's cache."""
    weights, rows, config = job
    matrix = prepared([random_matrix(weights, *WARM_SHAPE)])[0]
    x = torch.randn(rows, WARM_SHAPE[1], device="cuda").bfloat16()
    out = torch.empty(rows, WARM_SHAPE[0], dtype=torch.bfloat16, device="cuda")
    try:
        quant_linear(x, matrix, out, None, config)
        torch.cuda.synchronize()
    except Exception as error:  # out of shared memory or registers: not a candidate here
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def tune(cases: list[Case], workers: int) -> list[dict[str, Any]]:
    """The candidates of each case, fastest first: one row each."""
    formats = {(case.weights, case.m) for case in cases}
    jobs = [(w, m, config) for w, m in sorted(formats) for config in candidates(w, m)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        refused = dict(zip(jobs, pool.map(_precompile, jobs), strict=True))
    rows = []
    for shape in dict.fromkeys((case.weights, case.n, case.k) for case in cases):
        matrices = rotation(*shape)
        ready, dense = prepared(matrices), dense_of(matrices[0])
        for case in cases:
            if (case.weights, case.n, case.k) == shape:
                usable = [c for c in candidates(case.weights, case.m) if not refused[_job(case, c)]]
                rows += _measure(case, usable, ready, dense)
        del matrices, ready, dense
        torch.cuda.empty_cache()
    return rows


def _job(case: Case, config: Config) -> tuple[str, int, Config]:
    return case.weights, case.m, config


def _measure(
    case: Case, usable: list[Config], ready: list[QuantMatrix], dense: torch.Tensor
) -> list[dict[str, Any]]:
    x = torch.randn(case.m, case.k, device="cuda").bfloat16()
    out = torch.empty(case.m, case.n, dtype=torch.bfloat16, device="cuda")
    rows = []
    for config in usable:
        checked(case, x, ready[0], dense, config)
        sums, tiles = workspace_need(ready[0], case.m, config)
        workspace = Workspace(
            torch.empty(max(sums, 1), device="cuda"),
            torch.zeros(max(tiles, 1), dtype=torch.int32, device="cuda"),
        )
        calls = [partial(quant_linear, x, w, out, workspace, config) for w in ready]
        time = time_calls(calls, GRAPH_US, ROUNDS)
        rows.append({"case": case.name, "rows": case.m, "us": time.microseconds, **asdict(config)})
    rows.sort(key=lambda row: row["us"])
    for row in rows[:4]:
        print(row, flush=True)
    return rows
