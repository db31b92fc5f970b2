"""The benchmark of the indexer: DeepSeek-V4's heads and keys of one entry for four tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.cache_rows import INDEX_ROWS, RowFormat, encode_rows
from kernels.cache_rows.reference import decode_rows
from kernels.lightning_index import launch

HEADS, WIDTH, RATIO, PER_PAGE, TOP = 64, 128, 4, 64, 512
CACHED_BYTES = 240_000_000
CHECKED_TOKENS = 4
MAX_ERROR = 1e-4


@dataclass(frozen=True)
class Shape:
    """Queries at the end of a context of so many tokens."""

    name: str
    form: RowFormat | None
    tokens: int
    context: int
    scores_only: bool = False

    @property
    def entries(self) -> int:
        return self.context // RATIO


SHAPES = (
    Shape("scores e2m1", INDEX_ROWS, 1, 131072, scores_only=True),
    Shape("scores e2m1", INDEX_ROWS, 2048, 32768, scores_only=True),
    Shape("scores bf16", None, 2048, 32768, scores_only=True),
    Shape("select e2m1", INDEX_ROWS, 1, 131072),
    Shape("select e2m1", INDEX_ROWS, 6, 131072),
    Shape("select e2m1", INDEX_ROWS, 2048, 32768),
)


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        name = f"{shape.name} T={shape.tokens} ctx {shape.context}"
        yield Case("lightning_index", name, partial(_work, shape))


def inputs(shape: Shape, device: str = "cuda") -> tuple[launch.Queries, list[launch.Keys]]:
    """Queries that see all entries, and enough pools to exceed the caches."""
    per_row = shape.form.row_bytes(WIDTH) if shape.form is not None else 2 * WIDTH
    sets = min(8, max(2, CACHED_BYTES // (shape.entries * per_row)))
    q_THD = torch.randn(shape.tokens, HEADS, WIDTH, device=device).bfloat16()
    weights_TH = torch.randn(shape.tokens, HEADS, device=device)
    sequence_T = torch.zeros(shape.tokens, dtype=torch.int64, device=device)
    visible_T = torch.full((shape.tokens,), shape.entries, device=device)
    queries = launch.Queries(q_THD, weights_TH, sequence_T, visible_T)
    return queries, [_keys(shape, device) for _ in range(sets)]


def _keys(shape: Shape, device: str) -> launch.Keys:
    pages = -(-shape.entries // PER_PAGE)
    pool = torch.randn(pages, PER_PAGE, WIDTH, device=device).bfloat16()
    if shape.form is not None:
        pool = encode_rows(pool, shape.form)
    return launch.Keys(pool, torch.randperm(pages, device=device)[None], shape.form)


def exact_scores(queries: launch.Queries, keys: launch.Keys, tokens: int) -> torch.Tensor:
    """fp64 [tokens, entries] of the first queries."""
    rows = keys.pool[keys.pages[0]].flatten(0, 1)
    values = (rows if keys.form is None else decode_rows(rows, keys.form)).double()
    found = [
        (queries.q_THD[t].double() @ values.T).clamp_min(0).T @ queries.weights_TH[t].double()
        for t in range(tokens)
    ]
    return torch.stack(found)


def score_error(found_TN: torch.Tensor, exact_TN: torch.Tensor) -> float:
    error = (found_TN[: len(exact_TN), : exact_TN.shape[1]].double() - exact_TN).norm()
    return float(error / exact_TN.norm())


def selection_error(found_TS: torch.Tensor, exact_TN: torch.Tensor) -> float:
    """How far the sum of the chosen scores lies below the best sum; infinite for no selection."""
    found_TS = found_TS[: len(exact_TN)]
    if bool((found_TS < 0).any()) or bool((found_TS.diff(dim=1) <= 0).any()):
        return float("inf")
    best = exact_TN.topk(found_TS.shape[1]).values.sum(1)
    return float(((best - exact_TN.gather(1, found_TS).sum(1)) / best.abs()).max())


def _work(shape: Shape) -> Work:
    queries, sets = inputs(shape)
    held_TN = torch.empty(shape.tokens, shape.entries, device="cuda")
    checked = min(shape.tokens, CHECKED_TOKENS)

    def error() -> float:
        exact_TN = exact_scores(queries, sets[0], checked)
        if not shape.scores_only:
            return selection_error(launch.select_entries(queries, sets[0], TOP, None), exact_TN)
        held_TN.fill_(torch.nan)
        launch.fill_scores(queries, sets[0], held_TN)
        return score_error(held_TN, exact_TN)

    def call(keys: launch.Keys) -> object:
        if shape.scores_only:
            launch.fill_scores(queries, keys, held_TN)
            return held_TN
        return launch.select_entries(queries, keys, TOP, None)

    calls = [partial(call, keys) for keys in sets]
    nbytes = sets[0].pool.nbytes + queries.q_THD.nbytes + queries.weights_TH.nbytes
    nbytes += held_TN.nbytes if shape.scores_only else 8 * TOP * shape.tokens
    flops = 2.0 * shape.tokens * shape.entries * HEADS * WIDTH
    return Work(calls, error, MAX_ERROR, nbytes, flops)
