"""Triton kernels of the pointwise functions, and the functions for other kernels."""

from __future__ import annotations

import triton
import triton.language as tl

SIGMOID, SILU, SOFTPLUS = (tl.constexpr(kind) for kind in range(3))


@triton.jit
def sigmoid_of(x):
    """1 / (1 + exp(-x)) of fp32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu_of(x):
    """x / (1 + exp(-x)) of fp32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus_of(x):
    """max(x, 0) + log(1 + u) of fp32, u = exp(-|x|).

    log(w) u / (w - 1) with w = 1 + u rounded takes the rounding of w out again.
    """
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    step = w - 1.0
    tail = tl.where(step == 0.0, u, tl.log(w) * (u / tl.where(step == 0.0, 1.0, step)))
    return tl.where(x > 0.0, x, 0.0 * x) + tail


@triton.jit(do_not_specialize=["N"])
def pointwise(x, out, N, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """out [N] fp32 = function KIND of x [N]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if KIND == SIGMOID:
        y = sigmoid_of(value)
    elif KIND == SILU:
        y = silu_of(value)
    else:
        y = softplus_of(value)
    tl.store(out + at, y, mask=mask)


@triton.jit
def silu_and_mul(
    gate, up, out, gate_stride, up_stride, W, limit, LIMITED: tl.constexpr, BLOCK: tl.constexpr
):
    """out [T, W] = silu(gate) up; comparisons keep NaN."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < W
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    if LIMITED:
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, u)
        u = tl.where(u < -limit, -limit, u)
    tl.store(out + row * W + column, (silu_of(g) * u).to(out.dtype.element_ty), mask=mask)
