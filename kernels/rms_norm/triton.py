"""Triton kernel of the root-mean-square norm, plain or with an activated gate.

Legend: A x B rows of G values, the row a, b at a * stride_a + b * stride_b; R rows of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.activation.triton import sigmoid_of, silu_of

NO_GATE, SILU_GATE, SIGMOID_GATE = (tl.constexpr(kind) for kind in range(3))


@triton.jit(do_not_specialize=["AB", "B"])
def rms_norm(
    x, weight, gate, out, AB, B, stride_a, stride_b, gate_stride_a, gate_stride_b, eps,
    G: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, WEIGHTED: tl.constexpr,
    GROUPED: tl.constexpr, ZERO_CENTRED: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """out [A, B, G]; weight [G], or [B, G] where GROUPED."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    a, b = row // B, row % B
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < AB)[:, None] & (column < G)
    at = (a * stride_a + b * stride_b)[:, None] + column
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    y = value * tl.rsqrt(tl.sum(value * value, axis=1) * (1.0 / G) + eps)[:, None]
    if WEIGHTED:
        place = column + tl.zeros([R, 1], tl.int32)
        if GROUPED:
            place = column + (b * G)[:, None]
        w = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
        if ZERO_CENTRED:
            w = w + 1.0
        y = y * w
    if GATE != NO_GATE:
        at = (a * gate_stride_a + b * gate_stride_b)[:, None] + column
        g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
        y = y * (silu_of(g) if GATE == SILU_GATE else sigmoid_of(g))
    tl.store(out + row[:, None] * G + column, y.to(out.dtype.element_ty), mask=mask)
