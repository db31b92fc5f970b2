"""Triton kernels: rows of n-gram tables, also straight from the host's memory, and the gate.

Legend: N rows to read, V values of a row, T tokens, D hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.quant_linear.decode import e4m3_of_word

BIAS: tl.constexpr = tl.constexpr(1.329227995784916e36)  # 2^120, which the decoder leaves out
LEAST_DOT: tl.constexpr = tl.constexpr(1e-6)
GROUP: tl.constexpr = tl.constexpr(32)  # values that share a scale


@triton.jit
def _power(code):
    """2^(code - 127) of ue8m0 codes up to 254 in int32."""
    bits = tl.where(code == 0, 0x400000, code << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _rows(ids, number, inside, rows, LISTED: tl.constexpr):
    """The rows to read (int64), and those that exist."""
    row = number.to(tl.int64)
    if LISTED:
        row = tl.load(ids + number, mask=inside, other=-1)
    return row, inside & (row >= 0) & (row < rows)


@triton.jit(do_not_specialize=["table", "rows", "count"])
def gather_words(
    table, ids, out, rows, count, scale,
    WORDS: tl.constexpr, ROW_WORDS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    SCALED: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """out[i] = values of row ids[i] of the table at an address, zeros where there is none.

    Reads 8 bytes at a time. A row is WORDS words of codes, and with SCALED one more for every 8
    scales. Grid (N / TILE,).
    """
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = number < count
    row, known = _rows(ids, number, inside, rows, LISTED)
    start = table.to(tl.pointer_type(tl.int64), bitcast=True) + row[:, None] * ROW_WORDS
    word = tl.arange(0, PADDED)[None, :]
    there = known[:, None] & (word < WORDS)
    words = tl.load(start + word, mask=there, other=0)
    byte = tl.arange(0, 8)[None, None, :]
    code = ((words[:, :, None] >> (8 * byte)) & 0xFF).to(tl.int32)
    if SCALED:
        group = word // (GROUP // 8)
        scales = tl.load(start + WORDS + group // 8, mask=there, other=0)
        factor = _power(((scales >> (8 * (group % 8))) & 0xFF).to(tl.int32))[:, :, None]
    else:
        factor = scale
    value = e4m3_of_word(code, 0) * BIAS * factor
    at = number.to(tl.int64)[:, None, None] * (8 * WORDS) + 8 * word[:, :, None] + byte
    mask = inside[:, None, None] & (word < WORDS)[:, :, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table", "rows", "count"])
def gather_bytes(
    table, ids, out, rows, count, scale,
    VALUES: tl.constexpr, ROW_BYTES: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    SCALED: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The same for rows that are not whole words."""
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = number < count
    row, known = _rows(ids, number, inside, rows, LISTED)
    start = table.to(tl.pointer_type(tl.uint8), bitcast=True) + row[:, None] * ROW_BYTES
    column = tl.arange(0, PADDED)[None, :]
    there = known[:, None] & (column < VALUES)
    code = tl.load(start + column, mask=there, other=0).to(tl.int32)
    if SCALED:
        scales = tl.load(start + VALUES + column // GROUP, mask=there, other=0)
        factor = _power(scales.to(tl.int32))
    else:
        factor = scale
    value = e4m3_of_word(code, 0) * BIAS * factor
    at = number.to(tl.int64)[:, None] * VALUES + column
    mask = inside[:, None] & (column < VALUES)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate(
    streams, keys, value, q, k, closed, out, x_token, x_stream, key_token, key_stream, value_token,
    width, eps, root,
    STREAMS: tl.constexpr, BLOCK: tl.constexpr, CLOSED: tl.constexpr,
):  # fmt: skip
    """out = streams + gate * value. A program for each token and stream; `root` is D^-0.5."""
    token, stream = (tl.program_id(0) // STREAMS).to(tl.int64), tl.program_id(0) % STREAMS
    column = tl.arange(0, BLOCK)
    mask = column < width
    x = _wide(streams + token * x_token + stream * x_stream + column, mask)
    key = _wide(keys + token * key_token + stream * key_stream + column, mask)
    weight = _wide(q + stream * width + column, mask) * _wide(k + stream * width + column, mask)
    v = _wide(value + token * value_token + column, mask)
    dot = tl.sum(x * weight * key, 0)
    dot *= tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    dot *= tl.rsqrt(tl.sum(key * key, 0) / width + eps)
    dot *= root
    size = tl.sqrt(tl.maximum(tl.abs(dot), LEAST_DOT))
    negative = dot.to(tl.int32, bitcast=True) < 0
    opening = 1.0 / (1.0 + tl.exp(tl.where(negative, size, -size)))
    if CLOSED:
        opening = tl.where(tl.load(closed + token) != 0, 0.0, opening)
    y = x + opening * v
    at = (token * STREAMS + stream) * width + column
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _wide(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
