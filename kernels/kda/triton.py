"""Triton kernels of KDA: the decay, and what the pass of the delta rule needs of a chunk.

Legend: T tokens, B sequences, H heads, K key dim, C tokens of a chunk in blocks of R rows; a tile
[R, C / R, K] has row r of every block side by side, so that sums along a block stay in a thread.
Sums of log decays are to base 2.
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
def _rows(x, K: tl.constexpr):
    """bf16 [C, K] of a tile, in the order of the tokens."""
    return tl.reshape(tl.permute(x, (1, 0, 2)), (C, K)).to(tl.bfloat16)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 2) + L2_EPS)[:, :, None]


@triton.jit
def _scores(q, k, rows, columns, K: tl.constexpr):
    """Products [C, C] of q and of k, scaled by `rows`, with k, scaled by `columns`."""
    right = tl.trans(_rows(k * columns, K))
    return tl.dot(_rows(q * rows, K), right), tl.dot(_rows(k * rows, K), right)


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
    r = tl.arange(0, BLOCK)[:, None, None]
    a = tl.arange(0, C // BLOCK)[None, :, None]
    d = tl.arange(0, K)[None, None, :]
    row = a * BLOCK + r
    shown = row < count
    q_row = (first + row).to(tl.int64) * q_stride + head * K
    k_row = (first + row).to(tl.int64) * k_stride + head * K
    whole_row = ((first + row).to(tl.int64) * heads + head) * K
    g = tl.load(decay + whole_row + d, mask=shown, other=0.0)
    g = tl.maximum(g, CHANNEL_FLOOR) * LOG2_E
    k_tile = _unit(tl.load(k + k_row + d, mask=shown, other=0.0).to(tl.float32))
    q_tile = _unit(tl.load(q + q_row + d, mask=shown, other=0.0).to(tl.float32)) * scale
    # Of each block: its sum, that of its first half, and those of the blocks before it.
    total = tl.sum(g, 0)[None, :, :]
    half = tl.sum(tl.where(r < BLOCK // 2, g, 0.0), 0)[None, :, :]
    before = tl.cumsum(total, 1) - total
    g = tl.cumsum(g, 0)
    end = tl.sum(total, 1)[:, None, :]
    middle = tl.sum(tl.where(a < 2, total, 0.0), 1)[:, None, :]
    tile = tl.program_id(0).to(tl.int64)
    at = tile * (C * K) + row * K + d
    here = tl.exp2(before + g)
    tl.store(keys + at, (k_tile * here).to(tl.bfloat16))
    tl.store(queries + at, (q_tile * here).to(tl.bfloat16))
    tl.store(updates + at, (k_tile * tl.exp2(end - before - g)).to(tl.bfloat16))
    tl.store(factors + tile * K + d, tl.exp2(end))
    # Pairs of rows by how far they are apart: within a block, of neighbours that share a half,
    # and of the two halves. Exponents, but for those within half a block, are at most 0.
    p, s = _scores(q_tile, k_tile, tl.exp2(g - half), tl.exp2(half - g), K)
    near = tl.exp2(tl.where(a % 2 == 1, g, total - g))
    p_near, s_near = _scores(q_tile, k_tile, near, near, K)
    far = before + g - middle
    far = tl.exp2(tl.where(a < 2, -far, far))
    p_far, s_far = _scores(q_tile, k_tile, far, far, K)
    n = tl.arange(0, C)
    block = n // BLOCK
    same = block[:, None] == block[None, :]
    beside = block[:, None] // 2 == block[None, :] // 2
    p = tl.where(same, p, tl.where(beside, p_near, p_far))
    s = tl.where(same, s, tl.where(beside, s_near, s_far))
    p = tl.where(n[:, None] >= n[None, :], p, 0.0)
    b = tl.load(beta + (first + n).to(tl.int64) * heads + head, mask=n < count, other=0.0)
    s = tl.where(n[:, None] > n[None, :], s * b[:, None], 0.0)
    matrix = tile * (C * C) + n[:, None] * C + n[None, :]
    scratch = (weights + tile * (C * C)).to(tl.pointer_type(tl.float32))
    x = invert(s, scratch) * b[None, :]
    tl.store(solved + matrix, x.to(tl.bfloat16))
    tl.store(weights + matrix, p.to(tl.bfloat16))
