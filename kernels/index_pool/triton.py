"""Triton kernels of pooled keys: one key for R tokens, and its way into the pool.

Legend: T tokens, R tokens of a pool, D values of a key (a power of two), BT tokens of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cache_rows.triton import ceil_exponent, e4m3_code, place_of, power_of_two
from kernels.hadamard.triton import rotate

E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
SMALLEST_AMAX: tl.constexpr = tl.constexpr(1e-4)


@triton.jit(do_not_specialize=["T", "keys_stride", "gates_stride"])
def pool_keys(
    keys, gates, bias, out, T, keys_stride, gates_stride,
    R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """out[t] = sum_r softmax_r(gates + bias) keys, token after token. Strides are of a row [D]."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, DP)
    mask = (token < T)[:, None] & (d < D)[None, :]
    top = tl.full((BT, DP), float("-inf"), tl.float32)
    for r in tl.static_range(R):
        at = ((token * R + r) * gates_stride)[:, None] + d[None, :]
        gate = tl.load(gates + at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(bias + r * D + d, mask=d < D, other=0.0).to(tl.float32)
        top = tl.maximum(top, gate + b[None, :])
    total = tl.zeros((BT, DP), tl.float32)
    weighted = tl.zeros((BT, DP), tl.float32)
    for r in tl.static_range(R):
        row = (token * R + r)[:, None]
        gate = tl.load(gates + row * gates_stride + d[None, :], mask=mask, other=0.0)
        b = tl.load(bias + r * D + d, mask=d < D, other=0.0).to(tl.float32)
        key = tl.load(keys + row * keys_stride + d[None, :], mask=mask, other=0.0)
        share = tl.exp(gate.to(tl.float32) + b[None, :] - top)
        total += share
        weighted += share * key.to(tl.float32)
    at = token[:, None] * D + d[None, :]
    tl.store(out + at, (weighted / total).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "sequences", "width", "pages", "shift"])
def write_pools(
    keys, values, scales, table, sequence_of, positions, T, sequences, width, pages, shift,
    D: tl.constexpr, DP: tl.constexpr, LOG: tl.constexpr, RATIO: tl.constexpr,
    CODED: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Store the keys of tokens that complete a pool, as they are or as codes of the rotated."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    row, fills = place_of(
        table, sequence_of, positions, token, T, sequences, width, pages, shift, RATIO
    )
    d = tl.arange(0, DP)
    mask = fills[:, None] & (d < D)[None, :]
    x = tl.load(keys + token[:, None] * D + d[None, :], mask=mask, other=0.0)
    at = values + row[:, None] * D + d[None, :]
    if CODED:
        turned = rotate(x.to(tl.float32), BT, DP, LOG).to(keys.dtype.element_ty).to(tl.float32)
        peak = tl.maximum(tl.max(tl.abs(turned), 1), SMALLEST_AMAX)
        exponent = ceil_exponent(tl.div_rn(peak, tl.full(peak.shape, E4M3_MAX, tl.float32)))
        code = e4m3_code(turned * power_of_two(254 - exponent)[:, None])
        tl.store(at, code.to(tl.uint8), mask=mask)
        tl.store(scales + row, power_of_two(exponent), mask=fills)
    else:
        tl.store(at, x.to(values.dtype.element_ty), mask=mask)
