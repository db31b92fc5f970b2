"""Triton kernels of manifold-constrained hyper-connections.

Legend: T tokens, n streams (NS), D values of a stream, M mixing values; S splits of D, each of
`STEPS` blocks of BD columns of every stream; BT tokens of a program. `partial` [S, T, BM] holds
sums of a split: M products with fn, then the sum of squares.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.activation.triton import sigmoid_of
from kernels.hyper_connection.triton import two_parts


@triton.jit
def halve(fn, parts, X, BLOCK: tl.constexpr):
    """parts bf16 [2, X] whose sum is fn fp32 [X]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    high, low = two_parts(tl.load(fn + at, mask=at < X, other=0.0))
    tl.store(parts + at, high, mask=at < X)
    tl.store(parts + X + at, low, mask=at < X)


@triton.jit
def _times_fn(x, fn, at, mask, acc, X: tl.constexpr, EXACT: tl.constexpr):
    """acc + x [BT, BD] fn [BM, BD]^T, fn fp32 [X] or its two parts.

    Where x is EXACT in bf16, fn is a sum of two bf16 values.
    """
    high = tl.load(fn + at, mask=mask, other=0.0)
    if fn.dtype.element_ty == tl.bfloat16:
        low = tl.load(fn + X + at, mask=mask, other=0.0)
        acc = tl.dot(x, tl.trans(low), acc)
        return tl.dot(x, tl.trans(high), acc)
    elif EXACT:
        high, low = two_parts(high)
        acc = tl.dot(x, tl.trans(low), acc)
        return tl.dot(x, tl.trans(high), acc)
    else:
        return tl.dot(x.to(tl.float32), tl.trans(high), acc, input_precision="ieee")


@triton.jit
def _loaded(x, at, mask, D: tl.constexpr, NS: tl.constexpr):
    """A tuple of the tiles of all streams."""
    streams = ()
    for i in tl.static_range(NS):
        streams += (tl.load(x + at + i * D, mask=mask, other=0.0),)  # type: ignore[assignment]
    return streams


@triton.jit
def _expanded(streams, added, post, comb, token, j, inside, NS: tl.constexpr):
    """post[j] y + sum_i comb[i, j] x[i] of the tokens: fp32."""
    weight = tl.load(post + token * NS + j, mask=inside, other=0.0)
    value = added * weight[:, None]
    for i in tl.static_range(NS):
        c = tl.load(comb + (token * NS + i) * NS + j, mask=inside, other=0.0)
        value += streams[i].to(tl.float32) * c[:, None]
    return value


@triton.jit(do_not_specialize=["T"])
def project(
    x, y, post, comb, out, fn, partial, T, D: tl.constexpr, NS: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr,
    EXPAND: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """partial sums of one split; with EXPAND, of one step, of out = post y + comb x, written."""
    tl.static_assert(STEPS == 1 or not EXPAND)
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    split = tl.program_id(1)
    inside = token < T
    m = tl.arange(0, BM)
    acc = tl.zeros([BT, BM], tl.float32)
    squares = tl.zeros([BT, BD], tl.float32)
    for step in range(STEPS):
        d = (split * STEPS + step) * BD + tl.arange(0, BD)
        mask = inside[:, None] & (d < D)[None, :]
        fn_mask = (m < M)[:, None] & (d < D)[None, :]
        place = token[:, None] * (NS * D) + d[None, :]
        if EXPAND:
            streams = _loaded(x, place, mask, D, NS)
            at = token[:, None] * D + d[None, :]
            added = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        for j in tl.static_range(NS):
            if EXPAND:
                value = _expanded(streams, added, post, comb, token, j, inside, NS)
                value = value.to(out.dtype.element_ty)
                tl.store(out + place + j * D, value, mask=mask)
            else:
                value = tl.load(x + place + j * D, mask=mask, other=0.0)
            squares += value.to(tl.float32) * value.to(tl.float32)
            at = m[:, None] * (NS * D) + j * D + d[None, :]
            acc = _times_fn(value, fn, at, fn_mask, acc, M * NS * D, EXACT)
    acc = tl.where(m[None, :] == M, tl.sum(squares, axis=1)[:, None], acc)
    at = (split.to(tl.int64) * T + token)[:, None] * BM + m[None, :]
    tl.store(partial + at, acc, mask=inside[:, None])


@triton.jit
def _sinkhorn(c, eps, ITERATIONS: tl.constexpr):
    """Softmax of rows of [BT, n, n], then columns and rows divided by their sums in turn."""
    c = tl.exp(c - tl.max(c, axis=2)[:, :, None])
    c = c * (1.0 / tl.sum(c, axis=2))[:, :, None] + eps
    c = c * (1.0 / (tl.sum(c, axis=1) + eps))[:, None, :]
    for _ in range(ITERATIONS - 1):
        c = c * (1.0 / (tl.sum(c, axis=2) + eps))[:, :, None]
        c = c * (1.0 / (tl.sum(c, axis=1) + eps))[:, None, :]
    return c


@triton.jit
def _weights(
    partial, base, scale, pre, post, comb, token, T, norm_eps, hc_eps, post_scale,
    D: tl.constexpr, NS: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, S: tl.constexpr,
    BS: tl.constexpr, ITERATIONS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Store the weights of the tokens [BT] from their partial sums. Returns `pre` [BT, n]."""
    inside = token < T
    n = tl.arange(0, NS)
    s = tl.arange(0, BS)
    row = (s.to(tl.int64)[:, None] * T + token[None, :]) * BM
    known = (s < S)[:, None] & inside[None, :]
    square = tl.sum(tl.load(partial + row + M, mask=known, other=0.0), axis=0)
    inverse = tl.rsqrt(square * (1.0 / (NS * D)) + norm_eps)[:, None]
    at = row[:, :, None] + n[None, None, :]
    place = token[:, None] * NS + n[None, :]
    first = tl.sum(tl.load(partial + at, mask=known[:, :, None], other=0.0), axis=0) * inverse
    share = sigmoid_of(first * tl.load(scale) + tl.load(base + n)[None, :]) + hc_eps
    tl.store(pre + place, share, mask=inside[:, None])
    if not HEAD:
        second = tl.load(partial + at + NS, mask=known[:, :, None], other=0.0)
        second = tl.sum(second, axis=0) * inverse
        value = second * tl.load(scale + 1) + tl.load(base + NS + n)[None, :]
        tl.store(post + place, sigmoid_of(value) * post_scale, mask=inside[:, None])
        square_at = n[:, None] * NS + n[None, :]
        at = row[:, :, None, None] + 2 * NS + square_at[None, None, :, :]
        c = tl.sum(tl.load(partial + at, mask=known[:, :, None, None], other=0.0), axis=0)
        c = c * inverse[:, :, None]
        c = c * tl.load(scale + 2) + tl.load(base + 2 * NS + square_at)[None, :, :]
        at = token[:, None, None] * (NS * NS) + square_at[None, :, :]
        tl.store(comb + at, _sinkhorn(c, hc_eps, ITERATIONS), mask=inside[:, None, None])
    return share


@triton.jit(do_not_specialize=["T"])
def weigh(
    partial, base, scale, pre, post, comb, T, norm_eps, hc_eps, post_scale, D: tl.constexpr,
    NS: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, S: tl.constexpr, BS: tl.constexpr,
    BT: tl.constexpr, ITERATIONS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Weights of BT tokens from their partial sums: a thread has rows of a token's matrix."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    _weights(
        partial, base, scale, pre, post, comb, token, T, norm_eps, hc_eps, post_scale, D, NS, M,
        BM, S, BS, ITERATIONS, HEAD,
    )  # fmt: skip


@triton.jit
def _collapsed(streams, share, weight, d, norm_eps, D: tl.constexpr, NORM: tl.constexpr, kind):
    """The streams [n, BLOCK] of a token with weights [n], rounded to `kind`, and normalised."""
    z = tl.sum(streams * share[:, None], axis=0).to(kind)
    if NORM:
        z = z.to(tl.float32)
        w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        z = z * tl.rsqrt(tl.sum(z * z, axis=0) * (1.0 / D) + norm_eps) * w
    return z.to(kind)


@triton.jit(do_not_specialize=["T"])
def finish(
    x, partial, base, scale, given, weight, pre, post, comb, y, T, norm_eps, hc_eps, post_scale,
    D: tl.constexpr, NS: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, S: tl.constexpr,
    BS: tl.constexpr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr, HEAD: tl.constexpr,
    WEIGH: tl.constexpr, COLLAPSE: tl.constexpr, GIVEN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Weights of one token from its partial sums, and its streams collapsed and normalised.

    HEAD: `pre` alone. GIVEN: collapsed with `given` instead of the `pre` made here, which is
    made where WEIGH.
    """
    token = T - 1 - tl.program_id(0).to(tl.int64)  # the last are still in the cache
    n = tl.arange(0, NS)
    d = tl.arange(0, BLOCK)
    if COLLAPSE:
        at = token * (NS * D) + n[:, None] * D + d[None, :]
        streams = tl.load(x + at, mask=(d < D)[None, :], other=0.0).to(tl.float32)
    if WEIGH:
        share = _weights(
            partial, base, scale, pre, post, comb, token + tl.zeros((1,), tl.int64), T, norm_eps,
            hc_eps, post_scale, D, NS, M, BM, S, BS, ITERATIONS, HEAD,
        )  # fmt: skip
        share = tl.sum(share, axis=0)
    if COLLAPSE:
        if GIVEN:
            share = tl.load(given + token * NS + n)
        z = _collapsed(streams, share, weight, d, norm_eps, D, NORM, y.dtype.element_ty)
        tl.store(y + token * D + d, z, mask=d < D)


@triton.jit
def collapse(x, pre, out, D, NS: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, D] = sum_i pre[i] x[i], streams in order."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < D
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(NS):
        value = tl.load(x + (token * NS + i) * D + d, mask=mask, other=0.0).to(tl.float32)
        total += value * tl.load(pre + token * NS + i)
    tl.store(out + token * D + d, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def expand(x, y, post, comb, out, D, NS: tl.constexpr, BLOCK: tl.constexpr):
    """out[j] = post[j] y + sum_i comb[i, j] x[i]."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < D
    added = tl.load(y + token * D + d, mask=mask, other=0.0).to(tl.float32)
    for j in tl.static_range(NS):
        value = added * tl.load(post + token * NS + j)
        for i in tl.static_range(NS):
            c = tl.load(comb + (token * NS + i) * NS + j)
            stream = tl.load(x + (token * NS + i) * D + d, mask=mask, other=0.0)
            value += stream.to(tl.float32) * c
        at = (token * NS + j) * D + d
        tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)
