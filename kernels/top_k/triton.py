"""Triton kernel that selects the largest scores of a row.

Legend: N columns of a row, BLOCK columns whose keys a program holds in registers, CHUNK columns
that it writes out at a time, K numbers kept, KP the next power of two, UNIT entries of a block or
tokens of a pool, W slots of a row of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Codes of LENGTH: how many columns compete, from a number v of each row.
COUNT, COVER, COMPLETE = 0, 1, 2  # v; the blocks of UNIT that v entries touch; whole in v + 1
COVER_: tl.constexpr = tl.constexpr(COVER)
COMPLETE_: tl.constexpr = tl.constexpr(COMPLETE)
# Codes of NAMES: what a column is called.
COLUMN, NAMED, MEMBER = 0, 1, 2  # itself; its name; entry of the block that its UNIT columns name
NAMED_: tl.constexpr = tl.constexpr(NAMED)
MEMBER_: tl.constexpr = tl.constexpr(MEMBER)
# Codes of OUT.
NUMBERS, TOKENS, PART = 0, 1, 2  # int64 names; tokens of pools; names and scores of a segment
NUMBERS_: tl.constexpr = tl.constexpr(NUMBERS)
TOKENS_: tl.constexpr = tl.constexpr(TOKENS)
PART_: tl.constexpr = tl.constexpr(PART)

LEAST: tl.constexpr = tl.constexpr(-(2**31))  # below the key of every number
MOST: tl.constexpr = tl.constexpr(2**31 - 1)
# Two counts of a running sum share a word: at most 2048 above, up to 2^15 equal.
ABOVE_BITS: tl.constexpr = tl.constexpr(12)
ABOVE_MASK: tl.constexpr = tl.constexpr(2**12 - 1)


@triton.jit
def _key(x):
    """int32 in the order of fp32 x; `_number` is its inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _keys(scores, column, count, K, WHOLE: tl.constexpr):
    """Keys of a row's columns, LEAST for those that may not be taken."""
    shown = column < count
    if WHOLE:
        x = tl.load(scores + column, mask=shown & (count > K), other=0.0)
    else:
        x = tl.load(scores + column, mask=shown, other=0.0)
    key = _key(tl.where(x == 0.0, 0.0, x))
    return tl.where(shown & (x > float("-inf")), key, LEAST)


@triton.jit
def _bounds(key, K):
    """Keys low < high with count(key >= low) >= K > count(key >= high), and both counts.

    Either exactly K keys are at or above `low`, or `high` is `low` + 1. Where fewer than K may be
    taken, `low` is the least of them. Every second step halves the interval of keys, so 64 are
    the most; the others guess from the counts, which seldom takes more than ten.
    """
    low = tl.min(tl.where(key > LEAST, key, MOST), 0).to(tl.int64)
    high = tl.max(key, 0).to(tl.int64) + 1
    at_low = tl.sum((key > LEAST).to(tl.int32), 0)
    at_high = at_low * 0
    step = at_high
    while (at_low > K) & (high - low > 1):
        a = _number(low.to(tl.int32))
        b = _number((high - 1).to(tl.int32))
        part = (at_low - K).to(tl.float32) / (at_low - at_high).to(tl.float32)
        guess = _key(a + (b - a) * part).to(tl.int64)
        guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        middle = tl.where(step % 2 == 0, guess, (low + high) >> 1)
        count = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
        enough = count >= K
        low = tl.where(enough, middle, low)
        at_low = tl.where(enough, count, at_low)
        high = tl.where(enough, high, middle)
        at_high = tl.where(enough, at_high, count)
        step += 1
    return low.to(tl.int32), high.to(tl.int32), at_low, at_high


@triton.jit
def _competing(length, N, LENGTH: tl.constexpr, UNIT: tl.constexpr):
    """Columns of a row that compete."""
    count = length
    if LENGTH == COVER_:
        count = (length + (UNIT - 1)) // UNIT
    if LENGTH == COMPLETE_:
        count = (length + 1) // UNIT
    return tl.minimum(tl.maximum(count, 0), N).to(tl.int32)


@triton.jit(do_not_specialize=["K", "blocks"])
def select(
    scores, lengths, names, out, out_scores, N, K, blocks,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, KP: tl.constexpr, LENGTH: tl.constexpr,
    UNIT: tl.constexpr, NAMES: tl.constexpr, OUT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The K best of BLOCK columns of a row, in the order of the columns.

    WHOLE: rows with no more than K columns are taken whole and their scores not read. PART keeps
    scores too, with -inf behind the last, for the launch that selects among the segments of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    length = tl.load(lengths + row)
    count = N if NAMES == NAMED_ else _competing(length, N, LENGTH, UNIT)
    scores += row * N
    start = segment * BLOCK
    held = _keys(scores, start + tl.arange(0, BLOCK), count, K, WHOLE)
    low, high, at_low, at_high = _bounds(held, K)
    exact = at_low <= K
    bar = tl.where(exact, low, high)
    wanted = tl.where(exact, 0, K - at_high)  # of those equal to `low`, the first
    kept = tl.minimum(at_low, K)
    W = K * UNIT + UNIT - 1
    part = (row * tl.num_programs(1) + segment) * K
    done = at_low * 0
    for first in range(start, start + BLOCK, CHUNK):
        column = first + tl.arange(0, CHUNK)
        key = _keys(scores, column, count, K, WHOLE)
        above = key >= bar
        equal = (key == low) & (key < bar)
        both = above.to(tl.int32) | (equal.to(tl.int32) << ABOVE_BITS)
        before = done + tl.cumsum(both, 0) - both
        done += tl.sum(both, 0)
        equal_before = before >> ABOVE_BITS
        taken = above | (equal & (equal_before < wanted))
        place = (before & ABOVE_MASK) + tl.minimum(equal_before, wanted)
        name = column
        if NAMES == NAMED_:
            name = tl.load(names + row * N + column, mask=taken, other=0)
        if NAMES == MEMBER_:
            block = tl.load(names + row * blocks + column // UNIT, mask=taken, other=0)
            name = block.to(tl.int32) * UNIT + column % UNIT
        if OUT == PART_:
            tl.store(out + part + place, name, mask=taken)
            tl.store(out_scores + part + place, _number(key), mask=taken)
        if OUT == NUMBERS_:
            tl.store(out + row * K + place, name.to(tl.int64), mask=taken)
        if OUT == TOKENS_:
            for r in tl.static_range(UNIT):
                at = out + row * W + place * UNIT + r
                tl.store(at, name.to(tl.int64) * UNIT + r, mask=taken)
    slot = tl.arange(0, KP)
    behind = (slot >= kept) & (slot < K)
    if OUT == PART_:
        tl.store(out_scores + part + slot, tl.full((KP,), float("-inf"), tl.float32), mask=behind)
    if OUT == NUMBERS_:
        tl.store(out + row * K + slot, tl.full((KP,), -1, tl.int64), mask=behind)
    if OUT == TOKENS_:
        slot = tl.arange(0, 2 * KP * UNIT)
        token = (length + 1) // UNIT * UNIT + slot - kept * UNIT
        token = tl.where((token <= length) & (length >= 0), token, -1)
        tl.store(out + row * W + slot, token, mask=(slot >= kept * UNIT) & (slot < W))
