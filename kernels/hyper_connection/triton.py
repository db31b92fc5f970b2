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
def two_parts(x):
    """high and low in bf16 with high + low = x (1 + e), |e| <= 2^-18, of fp32 x.

    high is rounded by integer steps, ties away from zero: conversions of single values to bf16 are
    eight times as slow as additions, those of pairs, as here, are not.
    """
    bits = (x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000
    high = bits.to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _times(x, w, acc, SPLIT_X: tl.constexpr):
    """acc + x [BT, BK] w [BN, BK]^T. With w in bf16, fp32 x as the sum of two bf16 values."""
    if SPLIT_X:
        high, low = two_parts(x)
        acc = tl.dot(low, tl.trans(w), acc)
        return tl.dot(high, tl.trans(w), acc)
    else:
        return tl.dot(x, tl.trans(w.to(tl.float32)), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["T"])
def down(
    streams, norm, down, inject, partial, T, H: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STEPS: tl.constexpr, SPLIT_X: tl.constexpr,
):  # fmt: skip
    """Partial sums of one part of a stream: the rows of `down`, then those of `inject`."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    part, block = tl.program_id(1), tl.program_id(2)
    stream, first = part // S, (part % S) * (STEPS * BK)
    inside = token < T
    n = block * BN + tl.arange(0, BN)
    matrix = tl.where(n < L, down + n * (C * H), inject + (n - L) * (C * H))
    known = n < L + C
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
        w_mask = known[:, None] & valid[None, :]
        w = tl.load(matrix[:, None] + k[None, :], mask=w_mask, other=0.0)
        acc = _times(x, w, acc, SPLIT_X)
    start = (part.to(tl.int64) * T + token) * P
    mask = inside[:, None] & known[None, :]
    tl.store(partial + start[:, None] + n[None, :], acc, mask=mask)
    if block == 0:
        tl.store(partial + start + (L + C), squares, mask=inside)


@triton.jit(do_not_specialize=["T", "S", "STEPS"])
def down_many(
    streams, norm, down, inject, partial, T, S, STEPS, H: tl.constexpr, C: tl.constexpr,
    L: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, NB: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, SPLIT_X: tl.constexpr,
):  # fmt: skip
    """As `down`, of NB tiles of BN rows of `down` and of all rows of `inject`, to BC of them.

    x is read as BK / 8 tiles of [BT, 8]: in shared memory its rows of 32 bytes follow each other,
    so that the operand of a product, eight rows of them, is read without a conflict of banks.
    """
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    part, block = tl.program_id(1), tl.program_id(2)
    stream, first = part // S, (part % S) * (STEPS * BK)
    inside = token < T
    n, c = block * (NB * BN) + tl.arange(0, BN), tl.arange(0, BC)
    eights = tl.arange(0, BK // 8)[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]
    accs = ()
    for _ in tl.static_range(NB):
        accs += (tl.zeros([BT, BN], tl.float32),)  # type: ignore[assignment]
    acc = tl.zeros([BT, BC], tl.float32)
    squares = tl.zeros([BT], tl.float32)
    for step in range(STEPS):
        h = first + step * BK + tl.arange(0, BK)
        valid = h < H
        k = stream * H + h
        h_eights = first + step * BK + eights
        at = token[None, :, None] * (C * H) + stream * H + h_eights
        x_mask = inside[None, :, None] & (h_eights < H)
        r = tl.load(streams + at, mask=x_mask, other=0.0)
        squares += tl.sum(tl.sum(r * r, axis=2), axis=0)
        x = tl.reshape(tl.permute(r, (1, 0, 2)), (BT, BK))
        x = x * (1.0 + tl.load(norm + k, mask=valid, other=0.0).to(tl.float32))[None, :]
        new = ()
        for b in tl.static_range(NB):
            row = n + b * BN
            w_mask = (row < L)[:, None] & valid[None, :]
            w = tl.load(down + row[:, None] * (C * H) + k[None, :], mask=w_mask, other=0.0)
            new += (_times(x, w, accs[b], SPLIT_X),)  # type: ignore[assignment]
        accs = new
        w_mask = (c < C)[:, None] & valid[None, :]
        w = tl.load(inject + c[:, None] * (C * H) + k[None, :], mask=w_mask, other=0.0)
        acc = _times(x, w, acc, SPLIT_X)
    start = (part.to(tl.int64) * T + token) * P
    for b in tl.static_range(NB):
        row = n + b * BN
        mask = inside[:, None] & (row < L)[None, :]
        tl.store(partial + start[:, None] + row[None, :], accs[b], mask=mask)
    if block == 0:
        c_mask = inside[:, None] & (c < C)[None, :]
        tl.store(partial + start[:, None] + (L + c)[None, :], acc, mask=c_mask)
        tl.store(partial + start + (L + C), squares, mask=inside)


@triton.jit(do_not_specialize=["T"])
def combine(
    partial, low, weights, inverse, T, eps, H: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """low [T, L] = silu(down n / C), weights [T, C] = 2 sigmoid(inject n / C), inverse [T, C].

    A bf16 `low` is [2, T, L]: two parts.
    """
    token = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    c, s = tl.arange(0, C), tl.arange(0, S)
    row = ((c[:, None] * S + s[None, :]).to(tl.int64) * T + token) * P
    square = tl.sum(tl.load(partial + row + (L + C)), axis=1)
    size = tl.rsqrt(square * (1.0 / H) + eps)
    at = row[:, :, None] + p[None, None, :]
    sums = tl.sum(tl.load(partial + at, mask=(p < L + C)[None, None, :], other=0.0), axis=1)
    value = tl.sum(sums * size[:, None], axis=0) * (1.0 / C)
    gate_input = silu_of(value)
    if low.dtype.element_ty == tl.bfloat16:
        high, rest = two_parts(gate_input)
        tl.store(low + token * L + p, high, mask=p < L)
        tl.store(low + (T + token) * L + p, rest, mask=p < L)
    else:
        tl.store(low + token * L + p, gate_input, mask=p < L)
    tl.store(weights + token * C + p - L, 2.0 * sigmoid_of(value), mask=(p >= L) & (p < L + C))
    if tl.program_id(1) == 0:
        tl.store(inverse + token * C + c, size)


@triton.jit(do_not_specialize=["T"])
def up(
    streams, norm, low, up, inverse, out, T, H: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
    SPLIT_X: tl.constexpr,
):  # fmt: skip
    """out [T, H] = mean over streams of sigmoid(up low) * n: BN columns of every stream.

    With SPLIT_X `low` is two parts, else fp32.
    """
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    q = tl.arange(0, C * BN)
    h = tl.program_id(1) * BN + q % BN
    n = q // BN * H + h
    inside, valid = token < T, h < H
    acc = tl.zeros([BT, C * BN], tl.float32)
    for step in range(STEPS):
        k = step * BK + tl.arange(0, BK)
        at = token[:, None] * L + k[None, :]
        mask = inside[:, None] & (k < L)[None, :]
        x = tl.load(low + at, mask=mask, other=0.0)
        w_mask = valid[:, None] & (k < L)[None, :]
        w = tl.load(up + n[:, None] * L + k[None, :], mask=w_mask, other=0.0)
        if SPLIT_X:
            rest = tl.load(low + T.to(tl.int64) * L + at, mask=mask, other=0.0)
            acc = tl.dot(rest, tl.trans(w), acc)
            acc = tl.dot(x, tl.trans(w), acc)
        else:
            acc = _times(x, w, acc, False)
    mask = inside[:, None] & valid[None, :]
    size = tl.load(inverse + token[:, None] * C + (q // BN)[None, :], mask=mask, other=0.0)
    r = tl.load(streams + token[:, None] * (C * H) + n[None, :], mask=mask, other=0.0)
    g = tl.load(norm + n, mask=valid, other=0.0).to(tl.float32)
    gated = sigmoid_of(acc) * (r * size * (1.0 + g)[None, :])
    total = tl.sum(tl.reshape(gated, (BT, C, BN)), axis=1) * (1.0 / C)
    h = tl.program_id(1) * BN + tl.arange(0, BN)
    at = token[:, None] * H + h[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside[:, None] & (h < H)[None, :])


@triton.jit(do_not_specialize=["T"])
def up_many(
    streams, norm, low, up, inverse, out, T, H: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
    SPLIT_X: tl.constexpr,
):  # fmt: skip
    """As `up`, a product for each stream: their sum needs no exchange between threads."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    h = tl.program_id(1) * BN + tl.arange(0, BN)
    inside, valid = token < T, h < H
    accs = ()
    for _ in tl.static_range(C):
        accs += (tl.zeros([BT, BN], tl.float32),)  # type: ignore[assignment]
    for step in range(STEPS):
        k = step * BK + tl.arange(0, BK)
        at = token[:, None] * L + k[None, :]
        mask = inside[:, None] & (k < L)[None, :]
        x = tl.load(low + at, mask=mask, other=0.0)
        if SPLIT_X:
            rest = tl.load(low + T.to(tl.int64) * L + at, mask=mask, other=0.0)
        new = ()
        for c in tl.static_range(C):
            w_mask = valid[:, None] & (k < L)[None, :]
            w = tl.load(up + (c * H + h)[:, None] * L + k[None, :], mask=w_mask, other=0.0)
            if SPLIT_X:
                acc = tl.dot(rest, tl.trans(w), accs[c])
                acc = tl.dot(x, tl.trans(w), acc)
            else:
                acc = _times(x, w, accs[c], False)
            new += (acc,)  # type: ignore[assignment]
        accs = new
    mask = inside[:, None] & valid[None, :]
    total = tl.zeros([BT, BN], tl.float32)
    for c in tl.static_range(C):
        size = tl.load(inverse + token * C + c, mask=inside, other=0.0)
        r = tl.load(streams + token[:, None] * (C * H) + (c * H + h)[None, :], mask=mask, other=0.0)
        g = tl.load(norm + c * H + h, mask=valid, other=0.0).to(tl.float32)
        total += sigmoid_of(accs[c]) * (r * size[:, None] * (1.0 + g)[None, :])
    total = total * (1.0 / C)
    at = token[:, None] * H + h[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


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
