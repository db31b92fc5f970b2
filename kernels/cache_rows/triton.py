"""Triton kernels of stored rows: values to bytes and back, and the steps for other kernels.

Legend: N rows, R rows of a program, D values of a row (DP: the next power of two), of which the
last TAIL are stored plainly, GROUP values of a scale, ROW bytes of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cache_rows.decode import E4M3_

E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
E2M1_MAX: tl.constexpr = tl.constexpr(6.0)
LEAST_E4M3: tl.constexpr = tl.constexpr(1e-4)  # smallest group maximum that counts
LEAST_E2M1: tl.constexpr = tl.constexpr(6 * 2.0**-126)
LEAST_SCALE: tl.constexpr = tl.constexpr(2.0**-9)
# Adding 2^23 units rounds fp32 to whole units, ties to even; a unit is the subnormals' step.
E4M3_WHOLE: tl.constexpr = tl.constexpr(2.0**14)
E2M1_WHOLE: tl.constexpr = tl.constexpr(2.0**22)


@triton.jit
def ceil_exponent(x):
    """int32 b with 2^(b - 127) the least power of two >= x, of normal fp32 x > 0."""
    bits = x.to(tl.int32, bitcast=True)
    above = ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return tl.minimum((bits >> 23) + above, 254)


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127), of int32 1 to 254."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code(x):
    """int32 code of the e4m3 number nearest to fp32 x, ties to even; beyond 448 the largest."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), E4M3_MAX)
    size = magnitude.to(tl.int32, bitcast=True)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (magnitude + E4M3_WHOLE).to(tl.int32, bitcast=True) & 0x7FFFFF
    return tl.where(magnitude < 0.015625, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def e2m1_code(x):
    """int32 code of the e2m1 number nearest to fp32 x, ties to the even code; at most 6."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), E2M1_MAX)
    size = magnitude.to(tl.int32, bitcast=True)
    normal = ((size + 0x1FFFFF + ((size >> 22) & 1)) >> 22) - (126 << 1)
    small = (magnitude + E2M1_WHOLE).to(tl.int32, bitcast=True) & 0x7FFFFF
    return tl.where(magnitude < 1.0, small, normal) | ((bits >> 28) & 0x8)


@triton.jit
def e4m3_value(code):
    """fp32 of an int32 code."""
    return (((code << 24) >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def e2m1_value(code):
    """fp32 of an int32 code of four bits."""
    bits = ((code << 28) >> 6) & -0x7E400000
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _scales(values, FORM: tl.constexpr, E8M0: tl.constexpr):
    """Scale bytes (int32) of groups fp32 [R, groups, GROUP], and the scaled values."""
    peak = tl.max(tl.abs(values), 2)
    if E8M0:
        least = LEAST_E4M3 if FORM == E4M3_ else LEAST_E2M1
        most = E4M3_MAX if FORM == E4M3_ else E2M1_MAX
        byte = ceil_exponent(tl.maximum(peak, least) * (1.0 / most))
        scaled = values * power_of_two(254 - byte)[:, :, None]
    else:
        byte = e4m3_code(tl.maximum(tl.div_rn(peak, tl.full(peak.shape, 6.0, tl.float32)), 2.0**-9))
        scale = tl.broadcast_to(e4m3_value(byte)[:, :, None], values.shape)
        scaled = tl.div_rn(values, scale)
    return byte, scaled


@triton.jit
def store_rows(
    out, out_tail, number, mask, x, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TAIL: tl.constexpr, FORM: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr,
    E8M0: tl.constexpr, ITEM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Encode fp32 x [R, DP] and store it as the rows `number` (int64 [R]) of `out`, bytes.

    `out_tail` is `out` in the type of the plain values, of ITEM bytes.
    """
    CODED: tl.constexpr = D - TAIL
    CODES: tl.constexpr = CODED if FORM == E4M3_ else CODED // 2
    row = number * ROW
    d = tl.arange(0, DP)
    byte, scaled = _scales(tl.reshape(x, (R, DP // GROUP, GROUP)), FORM, E8M0)
    scaled = tl.reshape(scaled, (R, DP))
    if FORM == E4M3_:
        at = row[:, None] + d[None, :]
        tl.store(
            out + at, e4m3_code(scaled).to(tl.uint8), mask=mask[:, None] & (d < CODED)[None, :]
        )
    else:
        low, high = tl.split(tl.reshape(e2m1_code(scaled), (R, DP // 2, 2)))
        pair = tl.arange(0, DP // 2)
        at = row[:, None] + pair[None, :]
        codes = (low | (high << 4)).to(tl.uint8)
        tl.store(out + at, codes, mask=mask[:, None] & (pair < CODES)[None, :])
    if TAIL > 0:
        at = (number * (ROW // ITEM))[:, None] + (CODES // ITEM + d - CODED)[None, :]
        plain = mask[:, None] & ((d >= CODED) & (d < D))[None, :]
        tl.store(out_tail + at, x.to(out_tail.dtype.element_ty), mask=plain)
    group = tl.arange(0, DP // GROUP)
    at = row[:, None] + (CODES + TAIL * ITEM + group)[None, :]
    tl.store(out + at, byte.to(tl.uint8), mask=mask[:, None] & (group < CODED // GROUP)[None, :])
    for p in tl.static_range(PAD):
        end = row + (ROW - PAD + p)
        tl.store(out + end, tl.zeros((R,), tl.uint8), mask=mask)


@triton.jit
def place_of(
    table, sequence_of, positions, token, T, sequences, width, pages, shift, RATIO: tl.constexpr
):
    """Rows (int64) of a pool that tokens fill, and whether they fill one.

    A token fills entry position // RATIO when it is the last of RATIO tokens. Sequences, positions
    and table entries out of range fill none.
    """
    mask = token < T
    position = tl.load(positions + token, mask=mask, other=-1)
    sequence = tl.load(sequence_of + token, mask=mask, other=-1)
    entry = position // RATIO
    slot = entry >> shift
    mask = mask & (position >= 0) & ((position + 1) % RATIO == 0) & (slot < width)
    mask = mask & (sequence >= 0) & (sequence < sequences)
    page = tl.load(table + sequence * width + slot, mask=mask, other=-1)
    mask = mask & (page >= 0) & (page < pages)
    return (page.to(tl.int64) << shift) + (entry & ((1 << shift) - 1)), mask


@triton.jit(do_not_specialize=["N"])
def encode(
    x, out, out_tail, N, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TAIL: tl.constexpr,
    FORM: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr,
    ITEM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Rows of bytes from rows of values."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.arange(0, DP)
    mask = row < N
    at = row[:, None] * D + d[None, :]
    values = tl.load(x + at, mask=mask[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    store_rows(out, out_tail, row, mask, values, R, D, DP, TAIL, FORM, ROW, GROUP, E8M0, ITEM, PAD)


@triton.jit(do_not_specialize=["N"])
def decode(
    rows, rows_tail, out, N, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TAIL: tl.constexpr, FORM: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr,
    E8M0: tl.constexpr, ITEM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """fp32 values from rows of bytes."""
    CODED: tl.constexpr = D - TAIL
    CODES: tl.constexpr = CODED if FORM == E4M3_ else CODED // 2
    number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.arange(0, DP)
    mask = (number < N)[:, None] & (d < CODED)[None, :]
    row = (number * ROW)[:, None]
    byte = tl.load(rows + row + (CODES + TAIL * ITEM + d // GROUP)[None, :], mask=mask, other=1).to(
        tl.int32
    )
    if FORM == E4M3_:
        code = tl.load(rows + row + d[None, :], mask=mask, other=0).to(tl.int32)
        values = e4m3_value(code)
    else:
        code = tl.load(rows + row + (d // 2)[None, :], mask=mask, other=0).to(tl.int32)
        values = e2m1_value(code >> ((d % 2) * 4)[None, :])
    if E8M0:
        values *= tl.where(byte == 0, 2.0**-127, power_of_two(byte))  # 2^-127 is subnormal
    else:
        values *= e4m3_value(byte)
    if TAIL > 0:
        at = (number * (ROW // ITEM))[:, None] + (CODES // ITEM + d - CODED)[None, :]
        plain = (number < N)[:, None] & ((d >= CODED) & (d < D))[None, :]
        tail = tl.load(rows_tail + at, mask=plain, other=0.0).to(tl.float32)
        values = tl.where((d >= CODED)[None, :], tail, values)
    out_mask = (number < N)[:, None] & (d < D)[None, :]
    tl.store(out + number[:, None] * D + d[None, :], values, mask=out_mask)
