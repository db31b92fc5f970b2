"""Triton kernels of gated hyper-connections.

Legend: T tokens, C streams of H values, L low rank; each stream is split into S parts. `partial`
[C S, T, P] holds sums of a part before the stream's norm is known: L products with `down`, C with
`inject`, then the sum of squares. BT tokens, BN outputs, BK inputs of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.activation.triton import sigmoid_of, silu_of


@triton.jit
def _times(x, w, acc, SPLIT_X: tl.constexpr):
    """acc + x [BT, BK] w [BN, BK]^T. With w in bf16, fp32 x as the sum of two bf16 values."""
    if SPLIT_X:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(low, tl.trans(w), acc)
        return tl.dot(high, tl.trans(w), acc)
    else:
        return tl.dot(x, tl.trans(w.to(tl.float32)), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["T"])
def down(
    streams, norm, down, inject, partial, T, H: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STEPS: tl.constexpr, BLOCKS: tl.constexpr, SPLIT_X: tl.constexpr,
):  # fmt: skip
    """Partial sums of one part of a stream; the block of outputs BLOCKS is that of `inject`."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    part, block = tl.program_id(1), tl.program_id(2)
    stream, first = part // S, (part % S) * (STEPS * BK)
    inside = token < T
    if block < BLOCKS:
        matrix = down
        rows = L
        n = block * BN + tl.arange(0, BN)
        column = n
    else:
        matrix = inject
        rows = C
        n = tl.arange(0, BN)
        column = L + n
    acc = tl.zeros([BT, BN], tl.float32)
    squares = tl.zeros([BT], tl.float32)
    for step in range(STEPS):
        h = first + step * BK + tl.arange(0, BK)
        valid = h < H
        k = stream * H + h
        at = token[:, None] * (C * H) + k[None, :]
        x = tl.load(streams + at, mask=inside[:, None] & valid[None, :], other=0.0)
        squares += tl.sum(x * x, axis=1)
        x = x * (1.0 + tl.load(norm + k, mask=valid, other=0.0).to(tl.float32))[None, :]
        at = n[:, None] * (C * H) + k[None, :]
        w = tl.load(matrix + at, mask=(n < rows)[:, None] & valid[None, :], other=0.0)
        acc = _times(x, w, acc, SPLIT_X)
    start = (part.to(tl.int64) * T + token) * P
    mask = inside[:, None] & (n < rows)[None, :]
    tl.store(partial + start[:, None] + column[None, :], acc, mask=mask)
    if block == 0:
        tl.store(partial + start + (L + C), squares, mask=inside)


@triton.jit(do_not_specialize=["T"])
def combine(
    partial, low, weights, inverse, T, eps, H: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """low [T, L] = silu(down n / C), weights [T, C] = 2 sigmoid(inject n / C), inverse [T, C]."""
    token = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    c, s = tl.arange(0, C), tl.arange(0, S)
    row = ((c[:, None] * S + s[None, :]).to(tl.int64) * T + token) * P
    square = tl.sum(tl.load(partial + row + (L + C)), axis=1)
    size = tl.rsqrt(square * (1.0 / H) + eps)
    at = row[:, :, None] + p[None, None, :]
    sums = tl.sum(tl.load(partial + at, mask=(p < L + C)[None, None, :], other=0.0), axis=1)
    value = tl.sum(sums * size[:, None], axis=0) * (1.0 / C)
    tl.store(low + token * L + p, silu_of(value), mask=p < L)
    tl.store(weights + token * C + p - L, 2.0 * sigmoid_of(value), mask=(p >= L) & (p < L + C))
    if tl.program_id(1) == 0:
        tl.store(inverse + token * C + c, size)


@triton.jit(do_not_specialize=["T"])
def up(
    streams, norm, low, up, inverse, out, T, H: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
    SPLIT_X: tl.constexpr,
):  # fmt: skip
    """out [T, H] = mean over streams of sigmoid(up low) * n: one loop over streams and L."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    h = tl.program_id(1) * BN + tl.arange(0, BN)
    inside, valid = token < T, h < H
    mask = inside[:, None] & valid[None, :]
    total = tl.zeros([BT, BN], tl.float32)
    acc = tl.zeros([BT, BN], tl.float32)
    for step in range(C * STEPS):
        c = step // STEPS
        k = (step % STEPS) * BK + tl.arange(0, BK)
        x_at = token[:, None] * L + k[None, :]
        x = tl.load(low + x_at, mask=inside[:, None] & (k < L)[None, :], other=0.0)
        w_at = (c * H + h)[:, None] * L + k[None, :]
        w = tl.load(up + w_at, mask=valid[:, None] & (k < L)[None, :], other=0.0)
        acc = _times(x, w, acc, SPLIT_X)
        if step % STEPS == STEPS - 1:
            size = tl.load(inverse + token * C + c, mask=inside, other=0.0)
            place = token[:, None] * (C * H) + (c * H + h)[None, :]
            r = tl.load(streams + place, mask=mask, other=0.0)
            g = tl.load(norm + c * H + h, mask=valid, other=0.0).to(tl.float32)
            total += sigmoid_of(acc) * (r * size[:, None] * (1.0 + g)[None, :])
            acc = tl.zeros([BT, BN], tl.float32)
    at = token[:, None] * H + h[None, :]
    tl.store(out + at, (total * (1.0 / C)).to(out.dtype.element_ty), mask=mask)


@triton.jit
def write(streams, y, inject, out, H, C: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, C H] = streams + y inject; y is read once for all streams."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = h < H
    added = tl.load(y + token * H + h, mask=mask, other=0.0).to(tl.float32)
    for c in tl.static_range(C):
        at = (token * C + c) * H + h
        weight = tl.load(inject + token * C + c)
        value = tl.load(streams + at, mask=mask, other=0.0).to(tl.float32) + added * weight
        tl.store(out + at, value, mask=mask)
