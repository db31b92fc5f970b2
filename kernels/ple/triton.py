"""Triton kernels: row ids of n-gram tables by hash, and the gate.

Legend: T tokens, N n-gram size, h heads of all orders, C streams, H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_DOT: tl.constexpr = tl.constexpr(1e-6)


@triton.jit(do_not_specialize=["tokens", "eos"])
def hash_rows(
    codes, multipliers, sizes, offsets, rows, tokens, eos,
    N: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """rows[t, j] = (xor of code * multiplier over the order of head j) mod size + offset.

    With CUT all codes from the first missing or end-of-text predecessor on are `eos`.
    """
    token = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = token < tokens
    head = tl.arange(0, PADDED)
    there = head < HEADS
    last = head // (HEADS // (N - 1)) + 1  # the oldest code of the head's order
    mixed = tl.zeros((TILE,), tl.int64)
    own = tl.zeros((TILE, PADDED), tl.int64)
    cut = token < 0
    for s in tl.static_range(N):
        code = tl.load(codes + token * N + s, mask=inside, other=0)
        if CUT and s > 0:
            cut = cut | (code < 0) | (code == eos)
            code = tl.where(cut, eos, code)
        mixed = mixed ^ (code * tl.load(multipliers + s))
        own = tl.where((last == s)[None, :], mixed[:, None], own)
    size = tl.load(sizes + head, mask=there, other=1)[None, :]
    offset = tl.load(offsets + head, mask=there, other=0)[None, :]
    row = own % size + offset
    tl.store(rows + token[:, None] * HEADS + head[None, :], row, mask=inside[:, None] & there)


@triton.jit
def gate(
    key, query, value, out, key_token, query_token, value_token, width, root,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = sigmoid(s) * value. A program for each token and stream; `root` is H^-0.5."""
    token, stream = (tl.program_id(0) // COUNT).to(tl.int64), tl.program_id(0) % COUNT
    column = tl.arange(0, BLOCK)
    mask = column < width
    at = stream * width + column
    k = tl.load(key + token * key_token + at, mask=mask, other=0.0).to(tl.float32)
    q = tl.load(query + token * query_token + at, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(value + token * value_token + column, mask=mask, other=0.0).to(tl.float32)
    raw = tl.sum(k * q, 0) * root
    size = tl.sqrt(tl.maximum(tl.abs(raw), LEAST_DOT))
    signed = tl.where(raw > 0.0, size, tl.where(raw < 0.0, -size, 0.0))
    y = v / (1.0 + tl.exp(-signed))
    tl.store(out + token * (COUNT * width) + at, y.to(out.dtype.element_ty), mask=mask)
