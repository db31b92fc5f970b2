"""Triton kernels of rotary embeddings.

Legend: T tokens, H heads, D values of a head, F frequencies; R rows (a head of a token) of a
program. Paddings to powers of two: BF, BREST, BD.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _cos_and_sin(angle):
    """Of fp32 angles of any size below 2^40, within 2 ulp of 1.

    The angle less the nearest multiple of pi / 2 is taken in fp64; in what is left, -pi / 4 to
    pi / 4, the series end below 3e-8. The library's functions hold their slow path in local memory.
    """
    wide = angle.to(tl.float64)
    turns = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = (wide - turns * 1.5707963267948966).to(tl.float32)
    q = r * r
    sin = r + r * q * (
        -0.16666666666666666
        + q * (0.008333333333333333 + q * (-1.984126984126984e-4 + q * 2.7557319223985893e-6))
    )
    cos = 1.0 + q * (
        -0.5 + q * (0.041666666666666664 + q * (-1.388888888888889e-3 + q * 2.48015873015873e-5))
    )
    quarter = turns.to(tl.int64) & 3
    swapped = (quarter & 1) == 1
    c, s = tl.where(swapped, sin, cos), tl.where(swapped, cos, sin)
    c = tl.where((quarter == 1) | (quarter == 2), -c, c)
    return c, tl.where(quarter >= 2, -s, s)


@triton.jit(do_not_specialize=["N"])
def angles(
    positions, frequencies, cos, sin, N, scaling, F: tl.constexpr, OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """cos and sin [T, F], N = T F; positions [T], or [T, F] where OWN."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    place = at if OWN else at // F
    position = tl.load(positions + place, mask=mask, other=0).to(tl.float32)
    angle = position * tl.load(frequencies + at % F, mask=mask, other=0.0)
    c, s = _cos_and_sin(angle)
    tl.store(cos + at, c * scaling, mask=mask)
    tl.store(sin + at, s * scaling, mask=mask)


@triton.jit(do_not_specialize=["TH", "H"])
def halves(
    x, cos, sin, out, TH, H, stride_t, stride_h, D: tl.constexpr, F: tl.constexpr,
    BF: tl.constexpr, BREST: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """out [T, H, D]: value i < F turned with value i + F, those from 2F on as they are."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    token = row // H
    inside = (row < TH)[:, None]
    start = (token * stride_t + (row % H) * stride_h)[:, None]
    f = tl.arange(0, BF)[None, :]
    mask = inside & (f < F)
    a = tl.load(x + start + f, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + start + F + f, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + token[:, None] * F + f, mask=mask, other=0.0)
    s = tl.load(sin + token[:, None] * F + f, mask=mask, other=0.0)
    at = out + row[:, None] * D
    tl.store(at + f, (a * c - b * s).to(out.dtype.element_ty), mask=mask)
    tl.store(at + F + f, (b * c + a * s).to(out.dtype.element_ty), mask=mask)
    if 2 * F < D:
        rest = 2 * F + tl.arange(0, BREST)[None, :]
        mask = inside & (rest < D)
        tl.store(at + rest, tl.load(x + start + rest, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["TH", "H"])
def tail_pairs(
    x, cos, sin, out, TH, H, stride_t, stride_h, D: tl.constexpr, F: tl.constexpr,
    BD: tl.constexpr, R: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """out [T, H, D]: neighbours of the last 2F values turned, the others as they are; D even."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    token = row // H
    inside = (row < TH)[:, None]
    column = tl.arange(0, BD)[None, :]
    mask = inside & (column < D)
    start = (token * stride_t + (row % H) * stride_h)[:, None]
    value = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(value, (R, BD // 2, 2)))
    f = tl.arange(0, BD // 2)[None, :] - (D // 2 - F)
    turned = inside & (f >= 0) & (f < F)
    c = tl.load(cos + token[:, None] * F + f, mask=turned, other=1.0)
    s = tl.load(sin + token[:, None] * F + f, mask=turned, other=0.0)
    if INVERSE:
        s = -s
    y = tl.reshape(tl.join(a * c - b * s, a * s + b * c), (R, BD))
    tl.store(out + row[:, None] * D + column, y.to(out.dtype.element_ty), mask=mask)
