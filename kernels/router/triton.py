"""Triton kernels of the routers: one warp a token.

Legend: T tokens, E experts in G groups of N = E / G neighbours, k experts of a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Codes of SCORING.
SIGMOID, SQRT_SOFTPLUS, SOFTMAX = 0, 1, 2
SIGMOID_: tl.constexpr = tl.constexpr(SIGMOID)
SOFTMAX_: tl.constexpr = tl.constexpr(SOFTMAX)
TAKEN: tl.constexpr = tl.constexpr(-0x80000000)  # below every number's order


@triton.jit
def _independent_scores(logits, SCORING: tl.constexpr):
    """sigmoid, or the square root of softplus, of fp32 logits."""
    if SCORING == SIGMOID_:
        return 1.0 / (1.0 + tl.exp(-logits))
    else:
        # log(1 + e) of a small e from the rounded 1 + e: the quotient takes the rounding out.
        e = tl.exp(-tl.abs(logits))
        u = 1.0 + e
        rounded = u - 1.0
        log1p = tl.where(
            rounded == 0.0, e, tl.log(u) * (e / tl.where(rounded == 0.0, 1.0, rounded))
        )
        return tl.sqrt_rn(tl.maximum(logits, 0.0) + log1p)


@triton.jit
def _softmax(logits, BG: tl.constexpr, BN: tl.constexpr):
    """Of [BG, BN] as a whole."""
    flat = tl.reshape(logits, (BG * BN,))
    exponents = tl.exp(flat - tl.max(flat, 0))
    return tl.reshape(exponents / tl.sum(exponents, 0), (BG, BN))


@triton.jit
def _only_best_groups(biased, g, n, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """-inf for all experts outside the groups whose two largest add up to most."""
    best, at = tl.max(biased, 1, return_indices=True, return_indices_tie_break_left=True)
    second = tl.max(tl.where(n[None, :] == at[:, None], float("-inf"), biased), 1)
    sums = tl.where(g < GROUPS, best + second, float("-inf"))
    open_ = g < 0
    for _ in tl.static_range(TOP_GROUPS):
        chosen = g == tl.argmax(sums, 0, tie_break_left=True)
        open_ = open_ | chosen
        sums = tl.where(chosen, float("-inf"), sums)
    return tl.where(open_[:, None], biased, float("-inf"))


@triton.jit
def _order(x):
    """int32 in the order of fp32 x, both zeros the same: a warp's maximum is one instruction."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _of_order(order):
    """The fp32 value of `_order`."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _store_weights(
    weights, values, token, j, k_mask, eps, scale, NORMALISE: tl.constexpr, TOP_K: tl.constexpr
):
    """weights[token] = values / (sum of values + eps) * scale."""
    if NORMALISE:
        values = values / (tl.sum(tl.where(k_mask, values, 0.0), 0) + eps)
    tl.store(weights + token * TOP_K + j, values * scale, mask=k_mask)


@triton.jit(do_not_specialize=["bias_stride"])
def route(
    logits, bias, ids, weights, bias_stride, eps, scale, E: tl.constexpr, SCORING: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
    BG: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """ids int64 and weights fp32 [T, k] of logits fp32 [T, E], best first, ties by the lower id.

    The bias (row `bias_stride` * token; none with softmax) takes part in the choice alone. A NaN
    chooses some expert, never a number outside 0 to E - 1.
    """
    token = tl.program_id(0).to(tl.int64)
    MEMBERS: tl.constexpr = E // GROUPS
    g = tl.arange(0, BG)
    n = tl.arange(0, BN)
    expert = g[:, None] * MEMBERS + n[None, :]
    mask = (g < GROUPS)[:, None] & (n < MEMBERS)[None, :]
    row = tl.load(logits + token * E + expert, mask=mask, other=float("-inf"))
    if SCORING == SOFTMAX_:
        biased = _softmax(row, BG, BN)
    else:
        biased = _independent_scores(row, SCORING)
        biased += tl.load(bias + token * bias_stride + expert, mask=mask, other=0.0)
    biased = tl.where(mask, biased, float("-inf"))
    if GROUPS > 1:
        biased = _only_best_groups(biased, g, n, GROUPS, TOP_GROUPS)
    place = tl.arange(0, BG * BN)
    open_ = tl.where(tl.reshape(mask, (BG * BN,)), _order(tl.reshape(biased, (BG * BN,))), TAKEN)
    j = tl.arange(0, BK)
    chosen = tl.zeros((BK,), tl.int32)
    values = tl.zeros((BK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(open_, 0)
        at = tl.min(tl.where(open_ == best, place, BG * BN), 0)
        found = (at // BN) * MEMBERS + at % BN
        chosen = tl.where(j == rank, tl.minimum(found, E - 1), chosen)
        values = tl.where(j == rank, _of_order(best), values)
        open_ = tl.where(place == at, TAKEN, open_)
    k_mask = j < TOP_K
    tl.store(ids + token * TOP_K + j, chosen.to(tl.int64), mask=k_mask)
    if SCORING != SOFTMAX_:
        values = _independent_scores(tl.load(logits + token * E + chosen), SCORING)
    _store_weights(weights, values, token, j, k_mask, eps, scale, NORMALISE, TOP_K)


@triton.jit
def given_weights(
    logits, ids, weights, eps, scale, E, SCORING: tl.constexpr, TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """weights fp32 [T, k] of the experts `ids` [T, k]; 0 where an id is none."""
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BK)
    k_mask = j < TOP_K
    expert = tl.load(ids + token * TOP_K + j, mask=k_mask, other=0)
    held = (expert >= 0) & (expert < E)
    values = _independent_scores(
        tl.load(logits + token * E + expert, mask=held, other=0.0), SCORING
    )
    values = tl.where(held, values, 0.0)
    _store_weights(weights, values, token, j, k_mask, eps, scale, NORMALISE, TOP_K)
