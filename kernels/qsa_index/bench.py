"""The benchmark of the QSA indexer: Flash-Next's shapes, random keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.paged_attention.bench import place
from kernels.paged_attention.launch import Place
from kernels.qsa_index import launch

HEADS, WIDTH, RATIO, BUDGET, PAGE, BF16 = 4, 128, 4, 2048, 16, 2
ROTATED_BYTES = 240_000_000
CHECKED_TOKENS = 16
# Part of the tokens that may differ from those of fp64 scores: near ties.
MAX_ERROR = 2e-3
SHAPES = (  # sequences, new tokens, context
    (1, 1, 32768),
    (1, 1, 131072),
    (16, 4, 32768),
    (1, 2048, 32768),
)


def cases() -> Iterator[Case]:
    for sequences, new, context in SHAPES:
        name = f"B={sequences} T={new} of {context}"
        yield Case("qsa_index", name, partial(selection, sequences, new, context))


def selection(sequences: int, new: int, context: int, device: str = "cuda") -> Work:
    at = place(sequences, new, context, PAGE * RATIO, device)
    tokens, pages = sequences * new, at.page_table_BP.numel()
    q = torch.randn(tokens, HEADS, WIDTH, dtype=torch.bfloat16, device=device)
    size = (pages, PAGE, WIDTH)
    key_bytes = pages * PAGE * WIDTH * BF16
    pools = [
        torch.randn(size, dtype=torch.bfloat16, device=device)
        for _ in range(-(-ROTATED_BYTES // key_bytes))
    ]
    calls = [partial(launch.select_tokens, q, pool, at, RATIO, BUDGET) for pool in pools]

    def error() -> float:
        return wrong_part(calls[0](), q, pools[0], at)

    selected_bytes = 8 * tokens * (BUDGET + RATIO - 1)
    nbytes = key_bytes + q.nbytes + selected_bytes
    flops = 2.0 * HEADS * WIDTH * sum((p + 1) // RATIO for p in at.positions_T.tolist())
    return Work(calls, error, MAX_ERROR, nbytes, flops)


def wrong_part(found: torch.Tensor, q: torch.Tensor, pool: torch.Tensor, at: Place) -> float:
    """Part of the positions, of tokens spread over the step, that fp64 scores would not select."""
    wrong = count = 0
    for t in range(0, len(q), max(1, len(q) // CHECKED_TOKENS)):
        position = int(at.positions_T[t])
        blocks = (position + 1) // RATIO
        number = torch.arange(blocks, device=q.device)
        pages = at.page_table_BP[at.sequence_T[t], number // PAGE]
        keys = pool[pages, number % PAGE].double()
        scores = (keys @ q[t].double().t()).clamp(min=0).sum(1)
        ranked = torch.sort(scores, descending=True, stable=True).indices[: BUDGET // RATIO]
        expected = (ranked[:, None] * RATIO + torch.arange(RATIO, device=q.device)).flatten()
        tail = torch.arange(blocks * RATIO, position + 1, device=q.device)
        expected = torch.cat([expected, tail])
        row = found[t][found[t] >= 0]
        wrong += (
            len(expected) - int(torch.isin(expected, row).sum()) + abs(len(row) - len(expected))
        )
        count += len(expected)
    return wrong / count
