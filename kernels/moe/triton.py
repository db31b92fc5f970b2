"""Triton kernels of the routed experts.

Legend: T tokens, k experts of a token, P = T k pairs (pair t k + j is expert j of token t), E
experts of this rank, N outputs and K inputs of a matrix (N gate and N up rows of the first one).
Constants as in quant_linear; FORMAT may be PLAIN too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.quant_linear.triton import (
    finish,
    matrix_product,
    row_scales,
    row_words,
    scale_words,
    vector_product,
)

PLAIN = 3  # FORMAT of bf16, fp16 and fp32 weights
PLAIN_: tl.constexpr = tl.constexpr(PLAIN)
BAND = 8  # tiles of N whose programs run at the same time
BAND_: tl.constexpr = tl.constexpr(BAND)


@triton.jit(do_not_specialize=["P", "first_expert", "experts", "slots"])
def align_pairs(
    ids, order, tiles, P, first_expert, experts, slots, BM: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Program e lists the pairs of expert e, in order, and the tiles of BM of them.

    order int32 [P] holds the pairs, expert after expert. tiles int32 [3, slots]: expert or -1,
    first place in `order`, and where the expert's pairs end. Expert e takes the slots from
    (pairs before it) // BM + e on: enough for its tiles wherever they begin, and known without
    the other experts' tiles. slots = P // BM + E.
    """
    e = tl.program_id(0)
    lane = tl.arange(0, BP)
    before = tl.zeros((BP,), tl.int32)
    mine = tl.zeros((BP,), tl.int32)
    for p in range(0, P, BP):
        local = tl.load(ids + p + lane, mask=p + lane < P, other=-1) - first_expert
        local = tl.where(p + lane < P, local, -1)
        before += ((local >= 0) & (local < e)).to(tl.int32)
        mine += (local == e).to(tl.int32)
    start = tl.sum(before, 0)
    count = tl.sum(mine, 0)
    place = start
    for p in range(0, P, BP):
        local = tl.load(ids + p + lane, mask=p + lane < P, other=-1) - first_expert
        found = (local == e) & (p + lane < P)
        ranks = tl.cumsum(found.to(tl.int32), 0)
        tl.store(order + place + ranks - 1, p + lane, mask=found)
        place += tl.sum(found.to(tl.int32), 0)
    slot = start // BM + e
    next_slot = (start + count) // BM + e + 1
    if e == experts - 1:
        next_slot = slots
    t = tl.arange(0, 32)
    for s in range(slot, next_slot, 32):
        first = start + (s - slot + t) * BM
        mask = s + t < next_slot
        tl.store(tiles + s + t, tl.where(first < start + count, e, -1), mask=mask)
        tl.store(tiles + slots + s + t, first, mask=mask)
        tl.store(tiles + 2 * slots + s + t, tl.zeros_like(first) + start + count, mask=mask)


@triton.jit
def _place(slots, tiles_n):
    """(slot, tile of N) of this program: slots fastest within a band of tiles of N."""
    tile = tl.program_id(0)
    band = tile // (BAND_ * slots)
    width = tl.minimum(tiles_n - BAND_ * band, BAND_)
    within = tile % (BAND_ * slots)
    return within // width, BAND_ * band + within % width


@triton.jit
def _swiglu(pairs, limit, R: tl.constexpr, C: tl.constexpr, LIMIT: tl.constexpr):
    """[R, 2 C] of gate and up in turn to silu(gate) * up [R, C]."""
    gate, up = tl.split(tl.reshape(pairs, (R, C, 2)))
    if LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _plain_product(
    row_x, row_mask, weights, columns, column_mask, K, EVEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """matrix_product for weights [N, K] as they are, rounded to bf16."""
    k = tl.arange(0, BK)
    row_w = weights + columns.to(tl.int64)[:, None] * K
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        x_mask = row_mask
        w_mask = column_mask[:, None]
        if not EVEN:
            x_mask = x_mask & (first + k < K)[None, :]
            w_mask = w_mask & (first + k < K)[None, :]
        x_tile = tl.load(row_x + (first + k)[None, :], mask=x_mask, other=0.0)
        w = tl.load(row_w + (first + k)[None, :], mask=w_mask, other=0.0)
        acc = tl.dot(x_tile.to(tl.bfloat16), tl.trans(w.to(tl.bfloat16)), acc)
    return acc


@triton.jit
def _expert_product(
    row_x, row_mask, words, scales, zeros, expert, columns, column_mask, N, K,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr,
    ASYMMETRIC: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BKB: tl.constexpr, SCALE_WEIGHT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """fp32 [BM, BN]: rows of x times `columns` of an expert's matrix in a stack [E, N, K]."""
    if FORMAT == PLAIN_:
        own = words + expert.to(tl.int64) * N * K
        return _plain_product(row_x, row_mask, own, columns, column_mask, K, EVEN, BM, BN, BKB)
    else:
        own = words + expert.to(tl.int64) * N * row_words(K, FORMAT)
        scale_row = expert.to(tl.int64) * tl.cdiv(N, BLOCK_N)
        own_scales = scales + scale_row * scale_words(K, FORMAT, GROUP, SCALE)
        own_zeros = zeros + scale_row * (row_scales(K, FORMAT, GROUP) // 4)
        return matrix_product(
            row_x, row_mask, own, own_scales, own_zeros, columns, column_mask,
            K, 0, 4 * row_words(K, FORMAT), FORMAT, GROUP, BLOCK_N, SCALE, ASYMMETRIC, EVEN, BM, BN,
            BKB, SCALE_WEIGHT, PTX,
        )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "top_k"])
def gate_up(
    x, words, scales, zeros, hidden, order, tiles, slots, top_k, limit, N, K,
    LIMIT: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr, ASYMMETRIC: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BKB: tl.constexpr, SCALE_WEIGHT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """hidden [P, N] in the order of `order`: silu(gate x) * up x, of weights [E, 2 N, K].

    Columns of a tile are gate and up rows in turn, so a thread holds both of a value.
    """
    HALF: tl.constexpr = BN // 2
    slot, tile_n = _place(slots, tl.cdiv(N, HALF))
    expert = tl.load(tiles + slot)
    if expert < 0:
        return
    places = tl.load(tiles + slots + slot) + tl.arange(0, BM)
    place_mask = places < tl.load(tiles + 2 * slots + slot)
    token = tl.load(order + places, mask=place_mask, other=0) // top_k
    c = tl.arange(0, BN)
    value = tile_n * HALF + c // 2
    acc = _expert_product(
        x + token.to(tl.int64)[:, None] * K, place_mask[:, None], words, scales, zeros, expert,
        value + (c % 2) * N, value < N, 2 * N, K, FORMAT, GROUP, BLOCK_N, SCALE, ASYMMETRIC, EVEN,
        BM, BN, BKB, SCALE_WEIGHT, PTX,
    )  # fmt: skip
    columns = tile_n * HALF + tl.arange(0, HALF)
    at = hidden + places.to(tl.int64)[:, None] * N + columns[None, :]
    mask = place_mask[:, None] & (columns < N)[None, :]
    tl.store(at, _swiglu(acc, limit, BM, HALF, LIMIT).to(hidden.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slots"])
def down(
    hidden, words, scales, zeros, products, order, tiles, slots, N, K,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr,
    ASYMMETRIC: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BKB: tl.constexpr, SCALE_WEIGHT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """products [P, N] in the order of pairs: down times hidden [P, K], of weights [E, N, K]."""
    slot, tile_n = _place(slots, tl.cdiv(N, BN))
    expert = tl.load(tiles + slot)
    if expert < 0:
        return
    places = tl.load(tiles + slots + slot) + tl.arange(0, BM)
    place_mask = places < tl.load(tiles + 2 * slots + slot)
    pair = tl.load(order + places, mask=place_mask, other=0)
    columns = tile_n * BN + tl.arange(0, BN)
    column_mask = columns < N
    acc = _expert_product(
        hidden + places.to(tl.int64)[:, None] * K, place_mask[:, None], words, scales, zeros,
        expert, columns, column_mask, N, K, FORMAT, GROUP, BLOCK_N, SCALE, ASYMMETRIC, EVEN, BM,
        BN, BKB, SCALE_WEIGHT, PTX,
    )  # fmt: skip
    at = products + pair.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(at, acc.to(products.dtype.element_ty), mask=place_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["first_expert", "experts"])
def weighted_sum(
    products, ids, weights, out, first_expert, experts, N, TOP_K: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out fp32 [T, N]: products [P, N] times weights [P], added in the order of a token's pairs."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = columns < N
    total = tl.zeros((BN,), tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        local = tl.load(ids + pair) - first_expert
        held = (local >= 0) & (local < experts)
        weight = tl.where(held, tl.load(weights + pair), 0.0)
        at = products + pair * N + columns
        total += weight * tl.load(at, mask=mask & held, other=0.0).to(tl.float32)
    tl.store(out + token * N + columns, total, mask=mask)


@triton.jit
def _expert_vector(
    x, words, scales, zeros, expert, rows, row_mask, N, K, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, ASYMMETRIC: tl.constexpr,
    EVEN: tl.constexpr, BN: tl.constexpr, BKB: tl.constexpr,
):  # fmt: skip
    """fp32 [BN]: `rows` of an expert's matrix in a stack [E, N, K] times x [K]."""
    KW = row_words(K, FORMAT)
    scale_row = expert * tl.cdiv(N, BLOCK_N)
    own_scales = scales + scale_row * scale_words(K, FORMAT, GROUP, SCALE)
    own_zeros = zeros + scale_row * (row_scales(K, FORMAT, GROUP) // 4)
    return vector_product(
        x, words + expert * N * KW, own_scales, own_zeros, rows, row_mask, K, 0,
        tl.cdiv(4 * KW, BKB),
        FORMAT, GROUP, BLOCK_N, SCALE, ASYMMETRIC, EVEN, BN, BKB, 1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_expert", "experts", "top_k", "counters_used"])
def gate_up_vector(
    x, words, scales, zeros, hidden, ids, counters, first_expert, experts, top_k, counters_used,
    limit, N, K, LIMIT: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALE: tl.constexpr, ASYMMETRIC: tl.constexpr, EVEN: tl.constexpr,
    BN: tl.constexpr, BKB: tl.constexpr,
):  # fmt: skip
    """hidden [P, N] for few tokens: a program reads BN / 2 gate and as many up rows of one pair.

    It also sets the counters to zero that the second kernel counts with.
    """
    HALF: tl.constexpr = BN // 2
    tile = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    counter = (tl.program_id(1) * tl.num_programs(0) + tile) * 32 + tl.arange(0, 32)
    tl.store(counters + counter, tl.zeros((32,), tl.int32), mask=counter < counters_used)
    expert = tl.load(ids + pair) - first_expert
    if (expert < 0) | (expert >= experts):
        return
    c = tl.arange(0, BN)
    value = tile * HALF + c // 2
    sums = _expert_vector(
        x + pair // top_k * K, words, scales, zeros, expert, value + (c % 2) * N, value < N, 2 * N,
        K, FORMAT, GROUP, BLOCK_N, SCALE, ASYMMETRIC, EVEN, BN, BKB,
    )  # fmt: skip
    columns = tile * HALF + tl.arange(0, HALF)
    result = tl.reshape(_swiglu(sums, limit, 1, HALF, LIMIT), (HALF,))
    tl.store(hidden + pair * N + columns, result.to(hidden.dtype.element_ty), mask=columns < N)


@triton.jit(do_not_specialize=["first_expert", "experts", "top_k"])
def down_vector(
    hidden, words, scales, zeros, out, partial, counters, ids, weights, first_expert, experts,
    top_k, N, K, FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr, ASYMMETRIC: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr,
    BKB: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """out fp32 [T, N] for few tokens: a program adds BN outputs of a token over its experts, or
    over a share of them, which the last to arrive adds up in order.
    """
    tile = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    rows = tile * BN + tl.arange(0, BN)
    row_mask = rows < N
    each = tl.cdiv(top_k, SPLIT)
    total = tl.zeros((BN,), tl.float32)
    for j in range(split * each, tl.minimum(split * each + each, top_k)):
        pair = token * top_k + j
        expert = tl.load(ids + pair) - first_expert
        if (expert >= 0) & (expert < experts):
            sums = _expert_vector(
                hidden + pair * K, words, scales, zeros, expert, rows, row_mask, N, K, FORMAT,
                GROUP, BLOCK_N, SCALE, ASYMMETRIC, EVEN, BN, BKB,
            )  # fmt: skip
            total += tl.load(weights + pair) * sums
    size = tl.num_programs(1).to(tl.int64) * N
    index = tl.program_id(1) * tl.num_programs(0) + tile
    finish(out, partial, counters, total, token * N + rows, row_mask, size, index, split, SPLIT)
