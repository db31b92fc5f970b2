"""Triton kernels that select the largest scores of a row.

Legend: T rows, N columns of a row, G columns of a group, M groups that a program holds, W groups
of a row in memory, S groups that are chosen, C candidate columns that a program holds, K numbers
kept, KP the next power of two, UNIT entries of a block or tokens of a pool.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Codes of LENGTH: how many columns compete, from a number v of each row.
COUNT, COVER, COMPLETE = 0, 1, 2  # v; the blocks of UNIT that v entries touch; whole in v + 1
COVER_: tl.constexpr = tl.constexpr(COVER)
COMPLETE_: tl.constexpr = tl.constexpr(COMPLETE)
# Codes of NAMES: what a column is called.
COLUMN, MEMBER = 0, 1  # itself; entry of the block that its UNIT columns name
MEMBER_: tl.constexpr = tl.constexpr(MEMBER)
# Codes of OUT.
NUMBERS, TOKENS = 0, 1  # int64 names; tokens of pools
NUMBERS_: tl.constexpr = tl.constexpr(NUMBERS)
TOKENS_: tl.constexpr = tl.constexpr(TOKENS)
# Codes of MAXIMA: where those of the groups come from.
NONE, GIVEN, OWN = 0, 1, 2  # every column is a candidate; from memory; from the program itself
NONE_: tl.constexpr = tl.constexpr(NONE)
OWN_: tl.constexpr = tl.constexpr(OWN)

LEAST: tl.constexpr = tl.constexpr(-(2**31))  # below the key of every number
MOST: tl.constexpr = tl.constexpr(2**31 - 1)
NOTHING: tl.constexpr = tl.constexpr(float("-inf"))
# Two counts of up to 2^15 share a word.
HALF: tl.constexpr = tl.constexpr(16)
HALF_MASK: tl.constexpr = tl.constexpr(2**16 - 1)


@triton.jit
def key_of(x):
    """int32 in the order of fp32 x, -0 below 0; `number_of` is its inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def keys_of(x, shown):
    """Keys of the numbers shown, with -0 equal to 0; LEAST for the others, -inf and NaN."""
    return tl.where(shown & (x > NOTHING), key_of(x + 0.0), LEAST)


@triton.jit
def count_from(key, least):
    """How many keys are at or above `least`."""
    return tl.sum((key >= least).to(tl.int32), 0)


@triton.jit
def _logarithm(count):
    """Of a positive fp32 number to the base 2, plus 127, within 0.01."""
    bits = count.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07  # 2^-23
    rest = bits - tl.floor(bits)
    return bits + 0.345 * rest * (1.0 - rest)


@triton.jit
def bounds(key, low, high, at_low, K):
    """Keys low < high with count(key >= low) >= K > count(key >= high), and both counts.

    Given such a pair and `at_low`, narrowed until either exactly K keys are at or above `low` or
    `high` is `low` + 1. Where fewer than K keys are at or above `low` nothing is done. A step
    counts at two keys: where the logarithm of the count, if it were linear in the numbers, would
    be that of K; and in the middle of the interval, so that 32 steps are the most.
    """
    at_high = at_low * 0
    goal = _logarithm(K.to(tl.float32))
    while (at_low > K) & (high - 1 > low):
        a = number_of(low)
        b = number_of(high - 1)
        most = _logarithm(at_low.to(tl.float32))
        root = tl.rsqrt(most - _logarithm(at_high.to(tl.float32) + 0.5))  # dividing takes longer
        guess = key_of(a + (b - a) * ((most - goal) * root * root))
        guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        middle = low + ((high - low).to(tl.uint32, bitcast=True) >> 1).to(tl.int32, bitcast=True)
        first = tl.minimum(guess, middle)
        second = tl.maximum(guess, middle)
        both = tl.sum((key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << HALF), 0)
        at_first = both & HALF_MASK
        at_second = (both >> HALF) & HALF_MASK
        at_high = tl.where(at_second >= K, at_high, tl.where(at_first >= K, at_second, at_first))
        high = tl.where(at_second >= K, high, tl.where(at_first >= K, second, first))
        low = tl.where(at_second >= K, second, tl.where(at_first >= K, first, low))
        at_low = tl.where(at_second >= K, at_second, tl.where(at_first >= K, at_first, at_low))
    return low, high, at_low, at_high


@triton.jit
def taken_from(key, low, high, at_low, at_high, K):
    """Which keys are taken, and the place of each in their order.

    All from `low` where those are K or fewer; else all from `high` and of those equal to `low`
    the first, K in all.
    """
    if at_low <= K:
        taken = key >= low
        place = tl.cumsum(taken.to(tl.int32), 0) - 1
    else:
        above = key >= high
        equal = key == low
        both = above.to(tl.int32) + (equal.to(tl.int32) << HALF)
        before = tl.cumsum(both, 0) - both
        equal_before = (before >> HALF) & HALF_MASK
        wanted = K - at_high
        taken = above | (equal & (equal_before < wanted))
        place = (before & HALF_MASK) + tl.minimum(equal_before, wanted)
    return taken, place


@triton.jit
def scatter(at, value, mask, PTX: tl.constexpr):
    """tl.store of an integer of 32 or 64 bits by the thread that holds it.

    tl.store would first exchange pointers, values and mask between the threads, to no avail where
    the pointers follow no order.
    """
    if not PTX:
        tl.store(at, value, mask=mask)
    elif value.dtype.primitive_bitwidth == 64:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b64 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,l,r", [at.to(tl.int64), value, mask.to(tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r", [at.to(tl.int64), value, mask.to(tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _best_of_groups(scores, first, count, N, G: tl.constexpr, R: tl.constexpr):
    """Keys of the largest scores of R groups from column `first` on, LEAST where there is none."""
    column = first + tl.arange(0, R)[:, None] * G + tl.arange(0, G)[None, :]
    x = tl.load(scores + column, mask=column < N, other=NOTHING)
    best = tl.max(tl.where(column < count, x, NOTHING), 1)  # the larger of NaN and x is x
    return keys_of(best, best > NOTHING)


@triton.jit
def competing(length, N, LENGTH: tl.constexpr, UNIT: tl.constexpr):
    """Columns of a row that compete."""
    count = length
    if LENGTH == COVER_:
        count = (length + (UNIT - 1)) // UNIT
    if LENGTH == COMPLETE_:
        count = (length + 1) // UNIT
    return tl.minimum(tl.maximum(count, 0), N).to(tl.int32)


@triton.jit(do_not_specialize=["K"])
def best_of_groups(
    scores, lengths, maxima, N, W, K,
    G: tl.constexpr, R: tl.constexpr, LENGTH: tl.constexpr, UNIT: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Keys of the largest score of each group. Grid (T, W / R). WHOLE: not of rows of up to K
    columns.
    """
    row = tl.program_id(0).to(tl.int64)
    count = competing(tl.load(lengths + row), N, LENGTH, UNIT)
    first = tl.program_id(1) * R
    if (first * G < count) & ((count > K) | (not WHOLE)):
        group = first + tl.arange(0, R)
        best = _best_of_groups(scores + row * N, first * G, count, N, G, R)
        tl.store(maxima + row * W + group, best, mask=group < W)


@triton.jit
def _candidates(
    scores, maxima, chosen, count, N, W, K,
    G: tl.constexpr, M: tl.constexpr, S: tl.constexpr, R: tl.constexpr, MAXIMA: tl.constexpr,
    STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """How many groups hold the K best, keys [S G] of their columns, and bounds of the K-th."""
    groups = (count + (G - 1)) // G
    if MAXIMA == OWN_:
        for first in tl.range(0, groups, R, num_stages=STAGES):
            group = first + tl.arange(0, R)
            best = _best_of_groups(scores, first * G, count, N, G, R)
            tl.store(maxima + group, best, mask=group < W)
        tl.debug_barrier()
    group = tl.arange(0, M)
    key = tl.load(maxima + group, mask=group < W, other=LEAST)
    key = tl.where(group < groups, key, LEAST)
    low = tl.min(tl.where(key > LEAST, key, MOST), 0)
    most = tl.max(key, 0) + 1
    low, high, at_low, at_high = bounds(key, low, most, count_from(key, low), K)
    taken, place = taken_from(key, low, high, at_low, at_high, K)
    amount = tl.minimum(at_low, K)
    scatter(chosen + place, group, taken, PTX)
    tl.debug_barrier()
    column = _columns(chosen, amount, W, G, S)
    x = tl.load(scores + column, mask=column < N, other=NOTHING)
    key = tl.reshape(keys_of(x, column < count), (S * G,))
    if at_low < K:  # every group is chosen, whose other columns may be below its best
        low = tl.min(tl.where(key > LEAST, key, MOST), 0)
    return amount, key, low, most


@triton.jit
def _columns(chosen, amount, W, G: tl.constexpr, S: tl.constexpr):
    """Columns [S, G] of the groups chosen, beyond the last column behind the first `amount`."""
    slot = tl.arange(0, S)
    group = tl.load(chosen + slot, mask=slot < amount, other=W)
    return group[:, None] * G + tl.arange(0, G)[None, :]


@triton.jit(do_not_specialize=["K", "blocks"])
def select(
    scores, lengths, names, maxima, chosen, out, N, W, K, blocks,
    C: tl.constexpr, G: tl.constexpr, M: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
    KP: tl.constexpr, MAXIMA: tl.constexpr, LENGTH: tl.constexpr, UNIT: tl.constexpr,
    NAMES: tl.constexpr, OUT: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The K best columns of a row, ascending. One program a row.

    WHOLE: rows with no more than K columns are taken whole and their scores not read.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    count = competing(length, N, LENGTH, UNIT)
    width = K * UNIT + (UNIT - 1) if OUT == TOKENS_ else K
    out += row * width
    kept = tl.minimum(count, K)
    slot = tl.arange(0, KP)
    whole = count <= K
    if not WHOLE:
        whole = count < 0
    chosen += row * KP
    if whole:
        if OUT == NUMBERS_:
            scatter(out + slot, slot.to(tl.int64), slot < kept, PTX)
    else:
        scores += row * N
        column = tl.arange(0, C)
        if MAXIMA == NONE_:
            x = tl.load(scores + column, mask=column < N, other=NOTHING)
            key = keys_of(x, column < count)
            low = tl.min(tl.where(key > LEAST, key, MOST), 0)
            most = tl.max(key, 0) + 1
        else:
            groups, key, low, most = _candidates(
                scores, maxima + row * W, chosen, count, N, W, K, G, M, S, R, MAXIMA, STAGES, PTX
            )
        low, high, at_low, at_high = bounds(key, low, most, count_from(key, low), K)
        taken, place = taken_from(key, low, high, at_low, at_high, K)
        kept = tl.minimum(at_low, K)
        if MAXIMA != NONE_:  # read again: fewer registers are held during the search
            column = tl.reshape(_columns(chosen, groups, W, G, S), (C,))
        name = column
        if NAMES == MEMBER_:
            block = tl.load(names + row * blocks + column // UNIT, mask=taken, other=0)
            name = block.to(tl.int32) * UNIT + column % UNIT
        if OUT == NUMBERS_:
            scatter(out + place, name.to(tl.int64), taken, PTX)
        else:
            tl.debug_barrier()  # all threads have read the groups chosen
            scatter(chosen + place, name, taken, PTX)
    if OUT == NUMBERS_:
        tl.store(out + slot, tl.full((KP,), -1, tl.int64), mask=(slot >= kept) & (slot < K))
    else:
        tl.debug_barrier()
        _store_tokens(out, chosen, tl.arange(0, KP * UNIT), kept, length, whole, width, UNIT)
        behind = KP * UNIT + tl.arange(0, UNIT)
        _store_tokens(out, chosen, behind, kept, length, whole, width, UNIT)


@triton.jit
def _store_tokens(out, pools, slot, kept, length, whole, width, UNIT: tl.constexpr):
    """Some slots of a row: tokens of the pools kept (the first ones if `whole`), then of the tail,
    and -1 behind. Side by side, so that threads write whole sectors.
    """
    inside = slot < kept * UNIT
    pool = slot // UNIT
    if not whole:
        pool = tl.load(pools + pool, mask=inside, other=0)
    token = (length + 1) // UNIT * UNIT + slot - kept * UNIT
    token = tl.where((token <= length) & (length >= 0), token, -1)
    token = tl.where(inside, pool.to(tl.int64) * UNIT + slot % UNIT, token)
    tl.store(out + slot, token, mask=slot < width)
