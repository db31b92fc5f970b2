"""The benchmark of the embedding: rows of DeepSeek-V4's vocabulary, whole and an eighth of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.embedding import launch

VOCABULARY, WIDTH = 129_280, 4096
SETS = 8
EXACT = 1e-9


def cases() -> Iterator[Case]:
    for tokens, ranks in ((1, 1), (16, 1), (8192, 1), (8192, 8)):
        part = f"{VOCABULARY // ranks} of {VOCABULARY}"
        make = partial(lookups, tokens, VOCABULARY // ranks, WIDTH, "cuda")
        yield Case("embedding", f"{part} x {WIDTH} T={tokens}", make)


def lookups(tokens: int, rows: int, width: int, device: str) -> Work:
    """Random ids of the whole vocabulary; those outside `rows`, the last of it, give zeros."""
    table = torch.randn(rows, width, device=device).bfloat16()
    first = VOCABULARY - rows
    ids = [torch.randint(0, VOCABULARY, (tokens,), device=device) for _ in range(SETS)]
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=device)
    calls = [partial(launch.embedding, each, table, first, out) for each in ids]

    def error() -> float:
        out.fill_(torch.nan)
        calls[0]()
        held = ids[0] >= first
        wanted = torch.zeros_like(out)
        wanted[held] = table.index_select(0, ids[0][held] - first)
        return 0.0 if torch.equal(out, wanted) else float("inf")

    read = tokens * rows / VOCABULARY
    return Work(calls, error, EXACT, 8.0 * tokens + 2.0 * width * (tokens + read), 0.0)
