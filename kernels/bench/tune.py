"""Search for configurations: candidates measured on the shapes of the benchmark."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import product as combinations
from typing import Any

import torch

from kernels.bench.timing import time_calls
from kernels.quant_linear import prepare
from kernels.quant_linear.bench import Product, Setting, checked, inputs, products, random_matrix
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
        for (warps, block_n), split, stages in combinations(tiles, (1, 2, 4), (1, 3, 4)):
            yield Config("vector", block_n, 512 * warps, warps, stages=stages, split=split)
    elif rows <= 16:
        for block_n, stages, split in combinations((32, 64, 128), (3, 4), (1, 2, 4, 8)):
            yield Config("matrix", block_n, full, 4, 16, stages, split)
    elif rows <= 64:
        wide = ((32, 64, 4), (32, 128, 4), (64, 128, 4), (64, 128, 8), (64, 256, 8))
        for (block_m, block_n, warps), split in combinations(wide, (1, 2, 4, 8)):
            yield Config("matrix", block_n, full, warps, block_m, 3, split, True)
            if full > 64:
                yield Config("matrix", block_n, 64, warps, block_m, 4, split, True)
    else:
        # Tiles wider than high: each warp then decodes weights of its own.
        large = ((64, 128, 4), (64, 256, 8), (128, 256, 8))
        for (block_m, block_n, warps), stages in combinations(large, (3, 4)):
            yield Config("matrix", block_n, 64, warps, block_m, stages, 1, True)


def _precompile(job: tuple[str, int, Config]) -> str:
    """Launch once on small tensors: what compiles stays in Triton's cache."""
    weights, rows, config = job
    matrix: QuantMatrix = prepare(random_matrix(weights, *WARM_SHAPE), "triton")  # type: ignore[assignment]
    x = torch.randn(rows, WARM_SHAPE[1], device="cuda").bfloat16()
    out = torch.empty(rows, WARM_SHAPE[0], dtype=torch.bfloat16, device="cuda")
    try:
        quant_linear(x, matrix, out, None, config)
        torch.cuda.synchronize()
    except Exception as error:  # out of shared memory or registers: not a candidate here
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def tune(only: str, workers: int) -> list[dict[str, Any]]:
    """The candidates of each product whose name contains `only`, fastest first: one row each."""
    chosen = products(only)
    formats = {(product.weights, product.m) for product in chosen}
    jobs = [(w, m, c) for w, m in sorted(formats) for c in dict.fromkeys(candidates(w, m))]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        refused = dict(zip(jobs, pool.map(_precompile, jobs), strict=True))
    rows = []
    for shape in dict.fromkeys((p.weights, p.n, p.k) for p in chosen):
        setting = Setting(*shape)
        for p in chosen:
            if (p.weights, p.n, p.k) == shape:
                usable = [c for w, m, c in jobs if (w, m) == (p.weights, p.m)]
                usable = [c for c in usable if not refused[p.weights, p.m, c]]
                rows += _measure(p, usable, setting)
        del setting
        torch.cuda.empty_cache()
    return rows


def _measure(product: Product, usable: list[Config], setting: Setting) -> list[dict[str, Any]]:
    x = inputs(product)
    rows: list[dict[str, Any]] = []
    for config in usable:
        try:
            out = checked(product, x, setting, config)
        except RuntimeError as wrong:  # it is told, never chosen
            print(f"refused: {config}: {wrong}", flush=True)
            continue
        sums, tiles = workspace_need(setting.ready[0], product.m, config)
        workspace = Workspace(
            torch.empty(max(sums, 1), device="cuda"),
            torch.zeros(max(tiles, 1), dtype=torch.int32, device="cuda"),
        )
        calls = [partial(quant_linear, x, w, out, workspace, config) for w in setting.ready]
        time = time_calls(calls, GRAPH_US, ROUNDS)
        figures = {"case": product.shape, "rows": product.m, "us": time.microseconds}
        rows.append(figures | asdict(config))
    rows.sort(key=lambda row: row["us"])
    for row in rows[:4]:
        print(row, flush=True)
    return rows
