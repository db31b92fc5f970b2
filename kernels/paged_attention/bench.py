"""The benchmark of paged attention: shapes of the served models, random caches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.paged_attention import launch
from kernels.paged_attention.launch import Place
from kernels.split_keys import Partials

# Rotating caches exceed any card's cache by far.
ROTATED_BYTES = 240_000_000
MAX_ERROR = 6e-3
CHECKED_TOKENS = 16
PAGE, WIDTH, BF16 = 16, 256, 2
RATIO, BUDGET = 4, 2048  # of Flash-Next's selection


@dataclass(frozen=True)
class Shape:
    """The last `new` tokens of each of `sequences` of `context` tokens, these included."""

    name: str
    sequences: int
    new: int
    context: int
    heads: int = 24
    key_heads: int = 4
    selected: bool = False

    @property
    def tokens(self) -> int:
        return self.sequences * self.new

    @property
    def slots(self) -> int:
        return BUDGET + RATIO - 1

    @property
    def products(self) -> int:
        """Pairs of a token and a key that it sees."""
        if self.selected:
            return self.tokens * BUDGET
        first = self.context - self.new
        return self.sequences * sum(range(first + 1, self.context + 1))

    @property
    def flops(self) -> float:
        return 4.0 * self.products * self.heads * WIDTH

    @property
    def cache_bytes(self) -> int:
        """Keys and values that must be read."""
        keys = self.sequences * self.context
        if self.selected:
            keys = min(keys, self.products)
        return 2 * keys * self.key_heads * WIDTH * BF16

    @property
    def nbytes(self) -> float:
        """Caches; queries, gates and outputs."""
        return self.cache_bytes + 3 * self.tokens * self.heads * WIDTH * BF16


SHAPES = (
    Shape("27B decode B=1 32768", 1, 1, 32768),
    Shape("27B decode B=1 131072", 1, 1, 131072),
    Shape("27B decode B=16 32768", 16, 1, 32768),
    Shape("27B verify 4 B=1 32768", 1, 4, 32768),
    Shape("27B prefill 2048 over 8192", 1, 2048, 10240),
    Shape("Flash-Next decode B=16 32768 selected", 16, 1, 32768, key_heads=2, selected=True),
    Shape("Flash-Next prefill 2048 of 32768 selected", 1, 2048, 32768, key_heads=2, selected=True),
)
WRITTEN = (16, 8192)


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        yield Case("paged_attention", shape.name, partial(attention, shape))
    for tokens in WRITTEN:
        yield Case("paged_attention", f"write_pages T={tokens}", partial(write_pages, tokens))


def place(sequences: int, new: int, context: int, page: int, device: str) -> Place:
    """Pages of random places, and the last tokens of each sequence."""
    columns = -(-context // page)
    table = torch.randperm(sequences * columns, device=device).view(sequences, columns)
    sequence = torch.arange(sequences, device=device).repeat_interleave(new)
    positions = torch.arange(context - new, context, device=device).repeat(sequences)
    return Place(table, sequence, positions)


def selection(shape: Shape, device: str) -> torch.Tensor:
    """Random blocks of RATIO tokens: [T, slots], ascending, then -1."""
    blocks = (shape.context - shape.new) // RATIO
    ranked = torch.rand(shape.tokens, blocks, device=device).topk(BUDGET // RATIO).indices
    tokens = ranked.sort().values[:, :, None] * RATIO + torch.arange(RATIO, device=device)
    tail = torch.full((shape.tokens, RATIO - 1), -1, device=device)
    return torch.cat([tokens.flatten(1), tail], 1)


def attention(shape: Shape, device: str = "cuda") -> Work:
    at = place(shape.sequences, shape.new, shape.context, PAGE, device)
    rows = (shape.tokens, shape.heads, 2 * WIDTH)
    both = torch.randn(rows, dtype=torch.bfloat16, device=device)
    q, gate = both[..., :WIDTH].contiguous(), both[..., WIDTH:]
    pools = [_pools(shape, at, device) for _ in range(-(-ROTATED_BYTES // shape.cache_bytes))]
    selected = selection(shape, device) if shape.selected else None
    out = torch.empty_like(q)
    config = launch.configuration(q, shape.key_heads, shape.sequences, selected=shape.selected)
    partials = Partials.allocate(shape.tokens, shape.heads, config.splits, WIDTH, q.device)
    calls = [
        partial(
            launch.attend, q, k, v, at, out, gate_THD=gate, selected_TS=selected, partials=partials
        )
        for k, v in pools
    ]

    def error() -> float:
        out.fill_(torch.nan)
        calls[0]()
        return relative_error(out, q, *pools[0], at, gate, selected)

    return Work(calls, error, MAX_ERROR, shape.nbytes, shape.flops)


def _pools(shape: Shape, at: Place, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    size = (at.page_table_BP.numel(), PAGE, shape.key_heads, WIDTH)
    k, v = (torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return k, v


def relative_error(
    found: torch.Tensor,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    at: Place,
    gate: torch.Tensor,
    selected: torch.Tensor | None,
) -> float:
    """Of tokens spread over the step against fp64; infinite where an element was not written."""
    if bool(found.isnan().any()):
        return float("inf")
    wrong = right = 0.0
    for t in range(0, len(q), max(1, len(q) // CHECKED_TOKENS)):
        number = torch.arange(int(at.positions_T[t]) + 1, device=q.device)
        if selected is not None:
            number = selected[t][selected[t] >= 0]
        pages = at.page_table_BP[at.sequence_T[t], number // PAGE]
        k, v = (pool[pages, number % PAGE].double() for pool in (k_pool, v_pool))
        query = q[t].double().view(k.shape[1], -1, WIDTH)
        logits = torch.einsum("gid,lgd->gil", query, k) * WIDTH**-0.5
        o = torch.einsum("gil,lgd->gid", logits.softmax(-1), v).reshape(q.shape[1:])
        exact = o * torch.sigmoid(gate[t].double())
        wrong += float((found[t].double() - exact).square().sum())
        right += float(exact.square().sum())
    return math.sqrt(wrong / right)


def write_pages(tokens: int, device: str = "cuda") -> Work:
    at = place(1, tokens, tokens, PAGE, device)
    rows = torch.randn(tokens, 4, WIDTH, dtype=torch.bfloat16, device=device)
    pool = torch.empty(at.page_table_BP.numel(), PAGE, 4, WIDTH, dtype=rows.dtype, device=device)

    def error() -> float:
        pool.fill_(torch.nan)
        launch.write(rows, pool, at)
        found = pool[at.page_table_BP[0, at.positions_T // PAGE], at.positions_T % PAGE]
        return 0.0 if torch.equal(found, rows) else float("inf")

    return Work([partial(launch.write, rows, pool, at)], error, 0.0, 2 * rows.nbytes, 0.0)
