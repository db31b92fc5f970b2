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
def _times_tile(x, w, acc):
    """acc + x [BT, BD] w [BM, BD]^T of fp32 w: where x is bf16, w in two parts."""
    if x.dtype == tl.bfloat16:
        high, low = two_parts(w)
        acc = tl.dot(x, tl.trans(low), acc)
        return tl.dot(x, tl.trans(high), acc)
    else:
        return tl.dot(x.to(tl.float32), tl.trans(w), acc, input_precision="ieee")


@triton.jit
def _times_fn(x, fn, at, mask, acc, X: tl.constexpr):
    """acc + x [BT, BD] fn [BM, BD]^T, fn fp32 [X] or its two parts bf16 [2, X]."""
    high = tl.load(fn + at, mask=mask, other=0.0)
    if fn.dtype.element_ty == tl.bfloat16:
        low = tl.load(fn + X + at, mask=mask, other=0.0)
        acc = tl.dot(x, tl.trans(low), acc)
        return tl.dot(x, tl.trans(high), acc)
    else:
        return _times_tile(x, high, acc)


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
    x, fn, partial, T, D: tl.constexpr, NS: tl.constexpr, M: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Partial sums of one split of many tokens."""
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
        for j in tl.static_range(NS):
            value = tl.load(x + place + j * D, mask=mask, other=0.0)
            squares += value.to(tl.float32) * value.to(tl.float32)
            at = m[:, None] * (NS * D) + j * D + d[None, :]
            acc = _times_fn(value, fn, at, fn_mask, acc, M * NS * D)
    acc = tl.where(m[None, :] == M, tl.sum(squares, axis=1)[:, None], acc)
    at = (split.to(tl.int64) * T + token)[:, None] * BM + m[None, :]
    tl.store(partial + at, acc, mask=inside[:, None])


@triton.jit(do_not_specialize=["T"])
def project_few(
    x, y, post, comb, out, fn, partial, T, D: tl.constexpr, NS: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, EXPAND: tl.constexpr,
):  # fmt: skip
    """Partial sums of one split of BD columns; all loads first, none waits for another's use.

    With EXPAND, of out = post y + comb x, which is written and read again: made in registers the
    values would be made a second time in the layout of the product.
    """
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    split = tl.program_id(1)
    inside = token < T
    m = tl.arange(0, BM)
    d = split * BD + tl.arange(0, BD)
    mask = inside[:, None] & (d < D)[None, :]
    fn_mask = (m < M)[:, None] & (d < D)[None, :]
    place = token[:, None] * (NS * D) + d[None, :]
    streams = _loaded(x, place, mask, D, NS)
    rows = _loaded(fn, m[:, None] * (NS * D) + d[None, :], fn_mask, D, NS)
    if EXPAND:
        added = tl.load(y + token[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        for j in tl.static_range(NS):
            value = _expanded(streams, added, post, comb, token, j, inside, NS)
            tl.store(out + place + j * D, value.to(out.dtype.element_ty), mask=mask)
        tl.debug_barrier()
        values = _loaded(out, place, mask, D, NS)
    else:
        values = streams
    acc = tl.zeros([BT, BM], tl.float32)
    squares = tl.zeros([BT, BD], tl.float32)
    for j in tl.static_range(NS):
        value = values[j]
        squares += value.to(tl.float32) * value.to(tl.float32)
        acc = _times_tile(value, rows[j], acc)
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
    x, given, weight, y, T, norm_eps, D: tl.constexpr, NS: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """The streams of one token of many collapsed with `given` and normalised."""
    token = T - 1 - tl.program_id(0).to(tl.int64)  # the last are still in the cache
    n = tl.arange(0, NS)
    d = tl.arange(0, BLOCK)
    at = token * (NS * D) + n[:, None] * D + d[None, :]
    streams = tl.load(x + at, mask=(d < D)[None, :], other=0.0).to(tl.float32)
    share = tl.load(given + token * NS + n)
    z = _collapsed(streams, share, weight, d, norm_eps, D, NORM, y.dtype.element_ty)
    tl.store(y + token * D + d, z, mask=d < D)


@triton.jit
def _scaled(c, eps, N: tl.constexpr, ROWS: tl.constexpr):
    """The N x N scalars with rows, or columns, divided by (their sum + eps)."""
    step: tl.constexpr = 1 if ROWS else N
    start: tl.constexpr = N if ROWS else 1
    inverse = ()
    for i in tl.static_range(N):
        total = c[i * start]
        for j in tl.static_range(1, N):
            total += c[i * start + j * step]
        inverse += (1.0 / (total + eps),)  # type: ignore[assignment]
    out = ()
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            out += (c[i * N + j] * inverse[i if ROWS else j],)  # type: ignore[assignment]
    return out


@triton.jit
def _softmax(c, eps, N: tl.constexpr):
    """exp of the scalars less their row's largest, over their sum, + eps."""
    high = ()
    for i in tl.static_range(N):
        most = c[i * N]
        for j in tl.static_range(1, N):
            most = tl.maximum(most, c[i * N + j])
        for j in tl.static_range(N):
            high += (tl.exp(c[i * N + j] - most),)  # type: ignore[assignment]
    scaled = _scaled(high, 0.0, N, True)
    out = ()
    for i in tl.static_range(N * N):
        out += (scaled[i] + eps,)  # type: ignore[assignment]
    return out


@triton.jit
def _totals(
    partial, token, T, norm_eps, D: tl.constexpr, NS: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, S: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """The M products of a token over its root mean square, [BM]."""
    s, m = tl.arange(0, BS), tl.arange(0, BM)
    at = (s.to(tl.int64) * T + token)[:, None] * BM + m[None, :]
    total = tl.sum(tl.load(partial + at, mask=(s < S)[:, None], other=0.0), axis=0)
    square = tl.sum(tl.where(m == M, total, 0.0), axis=0)
    return total * tl.rsqrt(square * (1.0 / (NS * D)) + norm_eps)


@triton.jit(do_not_specialize=["T"])
def finish_few(
    x, partial, base, scale, given, weight, pre, post, comb, y, T, norm_eps, hc_eps, post_scale,
    D: tl.constexpr, NS: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, S: tl.constexpr,
    BS: tl.constexpr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr, HEAD: tl.constexpr,
    COLLAPSE: tl.constexpr, GIVEN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Weights of a token from its partial sums. Its first program makes `pre`, collapses with it
    (GIVEN: with `given`) and normalises; its second `post` and `comb`. HEAD: the first alone.
    """
    token = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BM)
    group = tl.minimum(m // NS, 2)
    bias = tl.load(base + m, mask=m < M, other=0.0)
    factor = tl.load(scale) if HEAD else tl.load(scale + group)
    if tl.program_id(1) == 0:
        d = tl.arange(0, BLOCK)
        if COLLAPSE:
            streams = _loaded(x, token * (NS * D) + d, d < D, D, NS)
            if NORM:
                w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        total = _totals(partial, token, T, norm_eps, D, NS, M, BM, S, BS)
        share = sigmoid_of(total * factor + bias) + hc_eps
        tl.store(pre + token * NS + m, share, mask=m < NS)
        if COLLAPSE:
            z = tl.zeros([BLOCK], tl.float32)
            for i in tl.static_range(NS):
                if GIVEN:
                    one = tl.load(given + token * NS + i)
                else:
                    one = tl.sum(tl.where(m == i, share, 0.0), axis=0)
                z += streams[i].to(tl.float32) * one
            z = z.to(y.dtype.element_ty)
            if NORM:
                z = z.to(tl.float32)
                z = z * tl.rsqrt(tl.sum(z * z, axis=0) * (1.0 / D) + norm_eps) * w
            tl.store(y + token * D + d, z.to(y.dtype.element_ty), mask=d < D)
    else:
        total = _totals(partial, token, T, norm_eps, D, NS, M, BM, S, BS)
        value = total * factor + bias
        at = post + token * NS + m - NS
        tl.store(at, sigmoid_of(value) * post_scale, mask=(m >= NS) & (m < 2 * NS))
        square = comb + token * (NS * NS)
        tl.store(square + m - 2 * NS, value, mask=(m >= 2 * NS) & (m < M))
        tl.debug_barrier()  # every thread takes the whole matrix: no sum needs another thread
        c = ()
        for i in tl.static_range(NS * NS):
            c += (tl.load(square + i),)  # type: ignore[assignment]
        tl.debug_barrier()
        c = _softmax(c, hc_eps, NS)
        c = _scaled(c, hc_eps, NS, False)
        for _ in range(ITERATIONS - 1):
            c = _scaled(c, hc_eps, NS, True)
            c = _scaled(c, hc_eps, NS, False)
        for i in tl.static_range(NS * NS):
            tl.store(square + i, c[i])


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
