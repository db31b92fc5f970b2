"""Triton kernels of KDA: the decay, and what the pass of the delta rule needs of a chunk.

Legend: T tokens, B sequences, H heads, K key dim, C tokens of a chunk in blocks of 16 rows. Sums of
log decays are to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.activation.triton import sigmoid_of, softplus_of
from kernels.gated_delta.triton import (
    BLOCK,
    CHANNEL_FLOOR,
    L2_EPS,
    LOG2_E,
    C,
    find_chunk,
    invert,
)


@triton.jit(do_not_specialize=["bound"])
def log_decay(
    f, a_log, dt_bias, out, f_stride, bound,
    HK: tl.constexpr, K: tl.constexpr, BOUNDED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N channels of one token."""
    token = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * N + tl.arange(0, N)
    mask = x < HK
    gate = tl.load(f + token * f_stride + x, mask=mask, other=0.0).to(tl.float32)
    gate += tl.load(dt_bias + x, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + x // K, mask=mask, other=0.0).to(tl.float32))
    value = bound * sigmoid_of(gate * rate) if BOUNDED else -rate * softplus_of(gate)
    tl.store(out + token * HK + x, value, mask=mask)


@triton.jit
def _sums(g, K: tl.constexpr):
    """Sums over the rows of each block of g [C / 16, 16, K], on tensor cores, of two bf16 parts.

    From the middle of the block: of the rows up to this one, less those behind it in the first
    half. And of the halves: row 0 has that of the first one, row 1 of the second, others zeros.
    """
    high = g.to(tl.bfloat16)
    low = (g - high.to(tl.float32)).to(tl.bfloat16)
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    second = j >= BLOCK // 2
    signs = tl.where(second & (j <= i), 1.0, tl.where((j > i) & (j < BLOCK // 2), -1.0, 0.0))
    ones = tl.where(i == tl.where(second, 1, 0), 1.0, 0.0)
    signs = tl.broadcast_to(signs.to(tl.bfloat16)[None, :, :], (C // BLOCK, BLOCK, BLOCK))
    ones = tl.broadcast_to(ones.to(tl.bfloat16)[None, :, :], (C // BLOCK, BLOCK, BLOCK))
    return tl.dot(signs, low, tl.dot(signs, high)), tl.dot(ones, low, tl.dot(ones, high))


@triton.jit
def _unit_factor(x):
    """[C / 16, 16, 1]: what makes the rows of x [C / 16, 16, K] unit length."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 2) + L2_EPS)[:, :, None]


@triton.jit
def _flat(x, factor, K: tl.constexpr):
    """bf16 [C, K] of x [C / 16, 16, K] times a factor [C / 16, K] of each block."""
    return tl.reshape((x * factor[:, None, :]).to(tl.bfloat16), (C, K))


@triton.jit
def _scores(q, k, right):
    """Products of rows of q and of k with those of `right`, within blocks where they have three
    dimensions.
    """
    right = tl.trans(right) if len(right.shape) == 2 else tl.trans(right, (0, 2, 1))
    return tl.dot(q, right), tl.dot(k, right)


@triton.jit
def _spread(x):
    """[C, C] with x [C / 16, 16, 16] along the diagonal; what is off it is a copy."""
    wide = tl.broadcast_to(x[:, :, None, :], (C // BLOCK, BLOCK, C // BLOCK, BLOCK))
    return tl.reshape(wide, (C, C))


@triton.jit
def _block_factors(halves, K: tl.constexpr):
    """fp32 factors of the 4 blocks [4, K] from the sums of their halves [4, 2, K] in memory.

    From the middle of the block to the start and to the end of the chunk, to the border with the
    neighbour in the same half, and to that of the halves; and the factor [K] of the chunk.
    """
    d = tl.arange(0, K)
    a0, b0 = tl.load(halves + d), tl.load(halves + K + d)
    a1, b1 = tl.load(halves + 2 * K + d), tl.load(halves + 3 * K + d)
    a2, b2 = tl.load(halves + 4 * K + d), tl.load(halves + 5 * K + d)
    a3, b3 = tl.load(halves + 6 * K + d), tl.load(halves + 7 * K + d)
    left, right = a0 + b0 + a1 + b1, a2 + b2 + a3 + b3
    begun = _four(a0, a0 + b0 + a1, left + a2, left + a2 + b2 + a3)
    rest = _four(b0 + a1 + b1 + right, b1 + right, b2 + a3 + b3, b3)
    near = _four(b0, a1, b2, a3)
    far = _four(b0 + a1 + b1, b1, a2, a2 + b2 + a3)
    return tl.exp2(begun), tl.exp2(rest), tl.exp2(near), tl.exp2(far), tl.exp2(left + right)


@triton.jit
def _four(x0, x1, x2, x3):
    """Four [K] as the rows of a tile."""
    a = tl.arange(0, 4)[:, None]
    low, high = (
        tl.where(a == 0, x0[None, :], x1[None, :]),
        tl.where(a == 2, x2[None, :], x3[None, :]),
    )
    return tl.where(a < 2, low, high)


@triton.jit(do_not_specialize=["tokens", "sequences", "heads"])
def prepare(
    q, k, decay, beta, starts, keys, queries, updates, solved, weights, factors, tokens,
    sequences, heads, q_stride, k_stride, scale,
    K: tl.constexpr,
):  # fmt: skip
    """What the pass needs of one chunk and head: three tiles, two [C, C] matrices, K factors."""
    slot = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    first, count = find_chunk(starts, slot, sequences, tokens)
    if count <= 0:
        return
    a = tl.arange(0, C // BLOCK)[:, None, None]
    r = tl.arange(0, BLOCK)[None, :, None]
    d = tl.arange(0, K)
    shown = a * BLOCK + r < count
    row = (first + a * BLOCK + r).to(tl.int64)
    e = d[None, None, :]
    g = tl.load(decay + (row * heads + head) * K + e, mask=shown, other=0.0)
    k_tile = tl.load(k + row * k_stride + head * K + e, mask=shown, other=0.0)
    q_tile = tl.load(q + row * q_stride + head * K + e, mask=shown, other=0.0)
    g, halves = _sums(tl.maximum(g, CHANNEL_FLOOR) * LOG2_E, K)
    tile = tl.program_id(0).to(tl.int64)
    scratch = (weights + tile * (C * C)).to(tl.pointer_type(tl.float32))
    tl.store(scratch + (2 * a + r) * K + e, halves, mask=r < 2)
    tl.debug_barrier()
    begun, rest, near, far, whole = _block_factors(scratch, K)
    tl.store(factors + tile * K + d, whole)
    here, back = tl.exp2(g), tl.exp2(-g)
    k_unit, q_unit = _unit_factor(k_tile), _unit_factor(q_tile) * scale
    k_here, k_back = k_tile * (here * k_unit), k_tile * (back * k_unit)
    q_here = q_tile * (here * q_unit)
    n = tl.arange(0, C)
    at = tile * (C * K) + n[:, None] * K + d[None, :]
    tl.store(keys + at, _flat(k_here, begun, K))
    tl.store(queries + at, _flat(q_here, begun, K))
    tl.store(updates + at, _flat(k_back, rest, K))
    # Pairs of rows by how far they are apart: within a block, of neighbours that share a half,
    # and of the two halves. Exponents, but for those within half a block, are at most 0.
    p, s = _scores(q_here.to(tl.bfloat16), k_here.to(tl.bfloat16), k_back.to(tl.bfloat16))
    p, s = _spread(p), _spread(s)
    side = _flat(tl.where(a % 2 == 1, k_here, k_back), near, K)
    p_near, s_near = _scores(_flat(q_here, near, K), side, side)
    side = _flat(tl.where(a >= 2, k_here, k_back), far, K)
    p_far, s_far = _scores(_flat(q_here, far, K), side, side)
    block = n // BLOCK
    same = block[:, None] == block[None, :]
    beside = block[:, None] // 2 == block[None, :] // 2
    p = tl.where(same, p, tl.where(beside, p_near, p_far))
    s = tl.where(same, s, tl.where(beside, s_near, s_far))
    p = tl.where(n[:, None] >= n[None, :], p, 0.0)
    b = tl.load(beta + (first + n).to(tl.int64) * heads + head, mask=n < count, other=0.0)
    s = tl.where(n[:, None] > n[None, :], s * b[:, None], 0.0)
    matrix = tile * (C * C) + n[:, None] * C + n[None, :]
    x = invert(s, scratch) * b[None, :]
    tl.store(solved + matrix, x.to(tl.bfloat16))
    tl.store(weights + matrix, p.to(tl.bfloat16))
