"""The benchmark of the selection: rows of normal scores of the served lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.top_k import launch, reference

# Rows, columns and numbers kept: one query of DeepSeek-V4 at 131072 and 1048576 tokens, prefill.
SHAPES = (
    (1, 32768, 512),
    (1, 262144, 512),
    (16, 32768, 512),
    (1024, 32768, 512),
    (2048, 8192, 512),
)
CACHED_BYTES = 240_000_000
CHECKED_ROWS = 8


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        rows, columns, k = shape
        peers: dict[str, Callable[[], Work | None]] = {"torch.topk": partial(_library, *shape)}
        yield Case("top_k", f"{k} of {columns} T={rows}", partial(_ours, *shape), peers)


def inputs(rows: int, columns: int, device: str = "cuda") -> list[torch.Tensor]:
    """Sets of scores that no cache holds together; at most 16."""
    sets = min(16, max(2, CACHED_BYTES // (4 * rows * columns)))
    return [torch.randn(rows, columns, device=device) for _ in range(sets)]


def wrong(found_TK: torch.Tensor, scores_TN: torch.Tensor) -> float:
    """Share of the checked rows whose numbers, in any order, are not those of the reference."""
    some = slice(0, CHECKED_ROWS)
    visible_T = torch.full_like(found_TK[some, 0], scores_TN.shape[1])
    exact = reference.top_k(scores_TN[some], visible_T, found_TK.shape[1])
    return float((found_TK[some].sort(1).values != exact).any(1).float().mean())


def _ours(rows: int, columns: int, k: int) -> Work:
    sets = inputs(rows, columns)
    out_TK = torch.empty(rows, k, dtype=torch.int64, device="cuda")
    count = launch.Rows(torch.full((rows,), columns, device="cuda"), whole=True)
    calls = [partial(launch.numbers, scores, count, k, out_TK) for scores in sets]

    def error() -> float:
        out_TK.fill_(-7)
        calls[0]()
        return wrong(out_TK, sets[0])

    return Work(calls, error, 1e-9, sets[0].nbytes + out_TK.nbytes, 0.0)


def _library(rows: int, columns: int, k: int) -> Work:
    sets = inputs(rows, columns)
    values = torch.empty(rows, k, device="cuda")
    out_TK = torch.empty(rows, k, dtype=torch.int64, device="cuda")
    calls = [partial(torch.topk, scores, k, sorted=False, out=(values, out_TK)) for scores in sets]

    def error() -> float:
        out_TK.fill_(-7)
        calls[0]()
        return wrong(out_TK, sets[0])

    return Work(calls, error, 0.5, sets[0].nbytes + out_TK.nbytes, 0.0)  # its ties are free
