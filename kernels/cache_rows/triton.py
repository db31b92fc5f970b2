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
def _rounded(magnitude, LEAST: tl.constexpr, BITS: tl.constexpr):
    """int32 whose low byte is the code of the number nearest to fp32 `magnitude`, ties to even.

    The format has BITS bits of mantissa and the smallest normal number 2^(LEAST - 127). A sum with
    2^(23 - BITS) times the power of two of `magnitude` keeps these bits; the exponent is added to
    them. UNITS of the last bit, added too, take the bias of fp32 out of the low byte.
    """
    UNITS: tl.constexpr = -(LEAST << BITS) % 256
    power = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.maximum(power, 2.0 ** (LEAST - 127))
    whole = power * (2.0 ** (23 - BITS) + UNITS * 2.0**-BITS) + magnitude
    return whole.to(tl.int32, bitcast=True) + (power.to(tl.int32, bitcast=True) >> (23 - BITS))


@triton.jit
def e4m3_code(x):
    """int32 whose low byte is the code of the e4m3 number nearest to fp32 x, ties to even.

    Beyond 448 it is the code of 448.
    """
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return _rounded(tl.minimum(tl.abs(x), E4M3_MAX), 121, 3) | sign


@triton.jit
def _e2m1_code(magnitude, x):
    """int32 whose low byte is the code of the e2m1 number nearest to fp32 `magnitude`, at most 6.

    Ties go to the even code; the sign is that of x.
    """
    return _rounded(magnitude, 127, 1) | ((x.to(tl.int32, bitcast=True) >> 28) & 0x8)


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
def _quotient(x, y, inverse):
    """x / y rounded to nearest, of fp32 x >= 0 and y of four bits, its inverse within two ulp.

    The remainder of the first quotient is exact; all mantissas of x and y were tried.
    """
    first = x * inverse
    return tl.fma(tl.fma(first, -y, x), inverse, first)


@triton.jit
def _e4m3_scale(peak):
    """int32 whose low byte is the scale of groups in e2m1 with the largest magnitudes `peak`."""
    size = _quotient(tl.minimum(peak, E4M3_MAX * 8), E2M1_MAX, 1.0 / E2M1_MAX)
    return e4m3_code(tl.maximum(size, LEAST_SCALE))


@triton.jit
def _e2m1_codes(values, scale, inverse):
    """Codes, low bytes of int32, of fp32 values over an e4m3 scale, its inverse within two ulp."""
    magnitude = tl.minimum(tl.abs(values), scale * E2M1_MAX)
    return _e2m1_code(_quotient(magnitude, scale, inverse), values)


@triton.jit
def _encoded(values, FORM: tl.constexpr, E8M0: tl.constexpr):
    """Scales of groups fp32 [R, groups, GROUP] and codes of the values: low bytes of int32."""
    peak = tl.max(tl.abs(values), 2)
    if E8M0:
        least = LEAST_E4M3 if FORM == E4M3_ else LEAST_E2M1
        most = E4M3_MAX if FORM == E4M3_ else E2M1_MAX
        byte = ceil_exponent(tl.maximum(peak, least) * (1.0 / most))
        scaled = values * power_of_two(254 - byte)[:, :, None]
        if FORM == E4M3_:
            codes = e4m3_code(scaled)
        else:
            codes = _e2m1_code(tl.minimum(tl.abs(scaled), E2M1_MAX), scaled)
    else:
        byte = _e4m3_scale(peak)
        scale = e4m3_value(byte)[:, :, None]
        codes = _e2m1_codes(values, scale, 1.0 / scale)
    return byte, codes


@triton.jit
def store_rows(
    out, out_tail, number, mask, x, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TAIL: tl.constexpr, FORM: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr,
    E8M0: tl.constexpr, ITEM: tl.constexpr, PAD: tl.constexpr, WITH_TAIL: tl.constexpr = True,
):  # fmt: skip
    """Encode fp32 x [R, DP] and store it as the rows `number` (int64 [R]) of `out`, bytes.

    `out_tail` is `out` in the type of the plain values, of ITEM bytes.
    """
    CODED: tl.constexpr = D - TAIL
    CODES: tl.constexpr = CODED if FORM == E4M3_ else CODED // 2
    row = number * ROW
    d = tl.arange(0, DP)
    byte, codes = _encoded(tl.reshape(x, (R, DP // GROUP, GROUP)), FORM, E8M0)
    codes = tl.reshape(codes, (R, DP))
    if FORM == E4M3_:
        at = row[:, None] + d[None, :]
        tl.store(out + at, codes.to(tl.uint8), mask=mask[:, None] & (d < CODED)[None, :])
    else:
        low, high = tl.split(tl.reshape(codes, (R, DP // 2, 2)))
        pair = tl.arange(0, DP // 2)
        at = row[:, None] + pair[None, :]
        codes = (low | (high << 4)).to(tl.uint8)
        tl.store(out + at, codes, mask=mask[:, None] & (pair < CODES)[None, :])
    if TAIL > 0 and WITH_TAIL:
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


@triton.jit
def _pairs(codes, G: tl.constexpr):
    """Bytes [G, 4] of e2m1 codes [G, 8]."""
    low, high = tl.split(tl.reshape(codes, (G, 4, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def _encode_groups(x, out, N, R: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr):
    """Rows of groups of 16 e2m1 codes with an e4m3 scale.

    A thread takes both halves of a group: nothing passes between threads.
    """
    GROUPS: tl.constexpr = D // 16
    G: tl.constexpr = R * GROUPS
    first = tl.program_id(0).to(tl.int64) * R
    g = tl.arange(0, G)
    h = tl.arange(0, 8)
    mask = g // GROUPS < N - first
    at = x + first * D + g[:, None] * 16 + h[None, :]
    a = tl.load(at, mask=mask[:, None], other=0.0)
    b = tl.load(at + 8, mask=mask[:, None], other=0.0)
    a, b = a.to(tl.float32), b.to(tl.float32)
    byte = _e4m3_scale(tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1)))
    scale = e4m3_value(byte)[:, None]
    inverse = 1.0 / scale
    a, b = _pairs(_e2m1_codes(a, scale, inverse), G), _pairs(_e2m1_codes(b, scale, inverse), G)
    codes = tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (G, 8))
    row = out + first * ROW + g // GROUPS * ROW
    tl.store(row[:, None] + (g % GROUPS)[:, None] * 8 + h[None, :], codes, mask=mask[:, None])
    tl.store(row + D // 2 + g % GROUPS, byte.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["N"])
def encode(
    x, out, out_tail, N, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TAIL: tl.constexpr,
    FORM: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr,
    ITEM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Rows of bytes from rows of values.

    Plain values are read apart: in the tile they are where codes need them, not a plain store.
    """
    if GROUP == 16 and not E8M0 and D == DP and TAIL + PAD == 0:
        _encode_groups(x, out, N, R, D, ROW)
    else:
        CODED: tl.constexpr = D - TAIL
        CODES: tl.constexpr = CODED if FORM == E4M3_ else CODED // 2
        row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
        d = tl.arange(0, DP)
        mask = row < N
        at = row[:, None] * D + d[None, :]
        coded = mask[:, None] & (d < CODED)[None, :]
        values = tl.load(x + at, mask=coded, other=0.0).to(tl.float32)
        if TAIL > 0:
            t = tl.arange(0, triton.next_power_of_2(TAIL))
            plain = mask[:, None] & (t < TAIL)[None, :]
            tail = tl.load(x + row[:, None] * D + (CODED + t)[None, :], mask=plain, other=0.0)
            at = (row * (ROW // ITEM))[:, None] + (CODES // ITEM + t)[None, :]
            tl.store(out_tail + at, tail.to(out_tail.dtype.element_ty), mask=plain)
        store_rows(
            out, out_tail, row, mask, values, R, D, DP, TAIL, FORM, ROW, GROUP, E8M0, ITEM, PAD,
            False,
        )  # fmt: skip


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
