"""The benchmark of GLM-5.3's pooled keys: pooling, writing and selection."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.hadamard.reference import hadamard
from kernels.index_pool import KeyPool, launch, reference

HEADS, WIDTH, RATIO, BUDGET, PER_PAGE = 32, 128, 4, 2048, 64
SETS, CHECKED_TOKENS = 4, 2
POOL_ERROR, CHOICE_ERROR = 4e-3, 1e-4
SELECTED = ((1, 131072, True), (1, 131072, False), (1024, 32768, True))  # tokens, context, coded


def cases() -> Iterator[Case]:
    for tokens in (1, 4096):
        yield Case("index_pool", f"pool keys T={tokens}", partial(_pool, tokens))
    for tokens, context, coded in SELECTED:
        kind = "e4m3" if coded else "bf16"
        name = f"select {kind} T={tokens} ctx {context}"
        yield Case("index_pool", name, partial(_select, tokens, context, coded))


def _pool(tokens: int) -> Work:
    shape = (tokens, RATIO, 2 * WIDTH)
    sets = [torch.randn(shape, device="cuda").bfloat16() for _ in range(SETS)]
    bias = torch.randn(RATIO, WIDTH, device="cuda").bfloat16()
    calls = [partial(launch.pool_keys, x[..., :WIDTH], x[..., WIDTH:], bias) for x in sets]

    def error() -> float:
        keys, gates = (x.double() for x in sets[0].split(WIDTH, 2))
        exact = (torch.softmax(gates + bias.double(), 1) * keys).sum(1)
        return float((calls[0]().double() - exact).norm() / exact.norm())

    return Work(calls, error, POOL_ERROR, sets[0].nbytes + 2 * tokens * WIDTH, 0.0)


def key_pool(pools: int, device: str, *, coded: bool) -> KeyPool:
    """Random keys in whole pages."""
    values = torch.randn(pools // PER_PAGE, PER_PAGE, WIDTH, device=device).bfloat16()
    if not coded:
        return KeyPool(values)
    codes, scale = reference.encode(values.flatten(0, 1))
    return KeyPool(codes.view(values.shape), scale.view(*values.shape[:2], 1))


def _select(tokens: int, context: int, coded: bool) -> Work:
    pools = context // RATIO
    pool = key_pool(pools, "cuda", coded=coded)
    q = torch.randn(tokens, HEADS, WIDTH, device="cuda").bfloat16()
    weights = torch.randn(tokens, HEADS, device="cuda")
    table = torch.randperm(pools // PER_PAGE, device="cuda")[None]
    sequence = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    positions = torch.full((tokens,), context - 1, device="cuda")
    given = (q, weights, pool, table, sequence, positions, RATIO, BUDGET)

    def error() -> float:
        return choice_error(launch.select_pools(*given), q, weights, pool, table)

    nbytes = pool.values.nbytes + q.nbytes + weights.nbytes + 8 * tokens * (BUDGET + RATIO - 1)
    nbytes += 0 if pool.scale is None else pool.scale.nbytes
    flops = 2.0 * tokens * pools * HEADS * WIDTH
    return Work([partial(launch.select_pools, *given)], error, CHOICE_ERROR, nbytes, flops)


def choice_error(
    found_TS: torch.Tensor,
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    pool: KeyPool,
    table_BP: torch.Tensor,
) -> float:
    """How far the sum of the chosen scores lies below the best, in fp64; of the first tokens."""
    rows = pool.values[table_BP[0]].flatten(0, 1)
    queries = q_THD[:CHECKED_TOKENS]
    if pool.scale is None:
        keys = rows.double()
    else:
        keys = rows.view(torch.float8_e4m3fn).double()
        keys = keys * pool.scale[table_BP[0]].flatten(0, 1).double()
        queries = hadamard(queries)
    worst = 0.0
    for t, q_HD in enumerate(queries.double()):
        scores = (q_HD @ keys.T).clamp_min(0).T @ weights_TH[t].double()
        chosen = found_TS[t, :BUDGET:RATIO] // RATIO
        if bool((chosen < 0).any()) or bool((chosen.diff() <= 0).any()):
            return float("inf")
        best = scores.topk(len(chosen)).values.sum()
        worst = max(worst, float((best - scores[chosen].sum()) / best.abs()))
    return worst
