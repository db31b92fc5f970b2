"""Triton kernel that finds the ends of prefixes and the drawn token; see `kernels.sampling.triton`.

Legend: R rows, V vocabulary, B blocks of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.bins.triton import PLANNED_, find, least_distance, up_to
from kernels.sampling.ordered.triton import draw_at, drawn_of, in_order, least_sum, listed
from kernels.sampling.triton import (
    BINS_,
    BINS_A_UNIT,
    DONE,
    FOUND,
    LISTED,
    MARKS_,
    NOTHING,
    Q_MASK,
    REACH,
    units_of,
    weigh,
)


@triton.jit
def _key(x):
    """int64 that orders fp32 numbers as they are."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    """The number of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _tile(x, ids, amount, capacity, vocab, start, bin, best, TILE: tl.constexpr):
    """Key, id and q of collected tokens, and which are of `bin`; x and ids are of the row.

    A list that overflowed is not read: all tokens of the row are.
    """
    place = start + tl.arange(0, TILE)
    listed = amount <= capacity
    inside = place < tl.where(listed, amount, vocab)
    token = tl.where(listed, tl.load(ids + place, mask=inside & listed, other=0), place)
    value = tl.load(x + token, mask=inside, other=NOTHING)
    found, q = weigh(value, best)
    return _key(value), token, q, inside & (found == bin)


@triton.jit
def _sum_q(
    x, ids, amount, capacity, vocab, bin, best, least, ONES: tl.constexpr, TILE: tl.constexpr
):
    """Sum of q (or number) of the bin's tokens with a key of at least `least`."""
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, tl.where(amount <= capacity, amount, vocab), TILE):
        key, _, q, ours = _tile(x, ids, amount, capacity, vocab, start, bin, best, TILE)
        if ONES:
            q = tl.full((TILE,), 1, tl.int64)
        total += tl.where(ours & (key >= least), q, 0)
    return tl.sum(total, 0)


@triton.jit
def _near_q(x, ids, amount, capacity, vocab, bin, best, distance, TILE: tl.constexpr):
    """Sum of q of the bin's tokens up to a distance from the best."""
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, tl.where(amount <= capacity, amount, vocab), TILE):
        key, _, q, ours = _tile(x, ids, amount, capacity, vocab, start, bin, best, TILE)
        total += tl.where(ours & (best - _value(key) <= distance), q, 0)
    return tl.sum(total, 0)


@triton.jit
def _range_of_keys(x, ids, amount, capacity, vocab, bin, best, TILE: tl.constexpr):
    """The least and the largest key of the bin."""
    low = tl.full((TILE,), 0x7FFFFFFF, tl.int64)
    high = tl.full((TILE,), -0x80000000, tl.int64)
    for start in range(0, tl.where(amount <= capacity, amount, vocab), TILE):
        key, _, _, ours = _tile(x, ids, amount, capacity, vocab, start, bin, best, TILE)
        low = tl.minimum(low, tl.where(ours, key, 0x7FFFFFFF))
        high = tl.maximum(high, tl.where(ours, key, -0x80000000))
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def _cut(
    x, ids, amount, capacity, vocab, bin, best, target, ONES: tl.constexpr, TILE: tl.constexpr
):
    """The key in which the running sum of q (or number) within the bin first exceeds `target`.

    Returns the key, how many tokens of that key it takes, less one, and the sum of q up to there.
    """
    low, high = _range_of_keys(x, ids, amount, capacity, vocab, bin, best, TILE)
    while low < high:
        middle = low + (high - low + 1) // 2
        if _sum_q(x, ids, amount, capacity, vocab, bin, best, middle, ONES, TILE) > target:
            low = middle
        else:
            high = middle - 1
    above = _sum_q(x, ids, amount, capacity, vocab, bin, best, low + 1, False, TILE)
    _, q = weigh(_value(low), best)
    if ONES:
        before = _sum_q(x, ids, amount, capacity, vocab, bin, best, low + 1, True, TILE)
        equal = target - before
    else:
        equal = (target - above) // q
    return low, equal, above + (equal + 1) * q


@triton.jit
def _equal_id(x, ids, amount, capacity, vocab, bin, best, key, equal, TILE: tl.constexpr):
    """The id of the token number `equal` (from 0), in order of ids, among those with `key`."""
    low = tl.zeros((), tl.int64)
    high = low + vocab - 1
    if equal == 0:  # the usual case needs one pass
        first = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
        for start in range(0, tl.where(amount <= capacity, amount, vocab), TILE):
            keys, token, _, ours = _tile(x, ids, amount, capacity, vocab, start, bin, best, TILE)
            first = tl.minimum(first, tl.where(ours & (keys == key), token, 0x7FFFFFFF))
        low = tl.min(first, 0).to(tl.int64)
        high = low
    while low < high:
        middle = (low + high) // 2
        number = tl.zeros((TILE,), tl.int64)
        for start in range(0, tl.where(amount <= capacity, amount, vocab), TILE):
            keys, token, _, ours = _tile(x, ids, amount, capacity, vocab, start, bin, best, TILE)
            number += (ours & (keys == key) & (token <= middle)).to(tl.int64)
        if tl.sum(number, 0) > equal:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _within(target, sums, counts, bin, cut_bin, cut_q):
    """`target` of a running sum of units as one of q within its bin, inside the kept prefix."""
    rest = (target - up_to(sums, bin - 1)).to(tl.float64)
    most = tl.load(counts + bin) & Q_MASK
    most = tl.where(bin == cut_bin, tl.minimum(most, cut_q), most) - 1
    inner = (rest / units_of(bin)).to(tl.int64)
    return tl.maximum(tl.minimum(inner, most), 0)


@triton.jit
def _reached(sums, bin, q):
    """Units up to and including q within a bin."""
    return up_to(sums, bin - 1) + (q.to(tl.float64) * units_of(bin)).to(tl.int64)


@triton.jit
def _searched(
    x, ids, amount, vocab, capacity, best, k, p, distance, u, total, counted, counts, numbers,
    sums, TILE: tl.constexpr,
):  # fmt: skip
    """The token of a row by bisection of the bits of its logits; k 0 is off."""
    unit_sums = tl.load(sums + tl.arange(0, BINS_))
    # The kept prefix: its units, and the bin and q within it where it ends.
    kept = total
    cut_bin, cut_q = tl.full((), BINS_, tl.int32), tl.full((), 0, tl.int64)
    if k > 0:
        cut_bin = find(tl.load(numbers + tl.arange(0, BINS_)), k - 1)
        inner = (k - 1 - up_to(numbers, cut_bin - 1)).to(tl.int64)
        _, _, cut_q = _cut(x, ids, amount, capacity, vocab, cut_bin, best, inner, True, TILE)
        kept = _reached(sums, cut_bin, cut_q)
    if p < 1.0:
        target = tl.minimum(least_sum(p, kept), counted) - 1
        bin = find(unit_sums, target)
        # The first q that reaches target + 1 is the first to exceed the q of target.
        inner = _within(target, sums, counts, bin, cut_bin, cut_q)
        _, _, cut_q = _cut(x, ids, amount, capacity, vocab, bin, best, inner, False, TILE)
        cut_bin, kept = bin, _reached(sums, bin, cut_q)
    if distance < REACH:
        bin = (distance * BINS_A_UNIT).to(tl.int32)
        inner = _near_q(x, ids, amount, capacity, vocab, bin, best, distance, TILE)
        reached = _reached(sums, bin, inner)
        if reached < kept:
            kept, cut_bin, cut_q = reached, bin, inner
    target = draw_at(u, kept, counted)
    bin = find(unit_sums, target)
    inner = _within(target, sums, counts, bin, cut_bin, cut_q)
    key, equal, _ = _cut(x, ids, amount, capacity, vocab, bin, best, inner, False, TILE)
    return _equal_id(x, ids, amount, capacity, vocab, bin, best, key, equal, TILE)


@triton.jit
def _of_one_bin(bin, units, number, next_bin, next_units, next_number):
    """Running sums that begin anew with each bin."""
    same = bin == next_bin
    units = tl.where(same, units, 0) + next_units
    number = tl.where(same, number, 0) + next_number
    return next_bin, units, number


@triton.jit
def _sorted(
    x, ids, amount, best, k, p, distance, u, total, counted, numbers, sums, F: tl.constexpr
):
    """The token of a row by sorting the F tokens or fewer that are listed; k 0 is off."""
    token, value, bin, q = in_order(x, ids, amount, best, F)
    weight = (q.to(tl.float64) * units_of(bin)).to(tl.int64)
    ones = tl.full((F,), 1, tl.int32)
    _, inner, number = tl.associative_scan((bin, weight, ones), 0, _of_one_bin)
    before = up_to(sums, bin - 1) + inner - weight
    place = up_to(numbers, bin - 1) + number - 1
    nearer = tl.zeros((), tl.int64)
    if distance < REACH:
        nearer = up_to(sums, (distance * BINS_A_UNIT).to(tl.int32) - 1)
    there = tl.arange(0, F) < amount
    return drawn_of(
        token, best - value, weight, before, place, there, total, counted, k, p, distance, u,
        nearer, F,
    )  # fmt: skip


@triton.jit(do_not_specialize=["blocks", "capacity", "tiles"])
def collect(
    x, temperature, top_k, top_p, min_p, uniform, block_best, counts, marks, plan, numbers, sums,
    ids, out, vocab, blocks, capacity, tiles,
    BLOCK: tl.constexpr, FEW: tl.constexpr, F: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ids of the tokens in the bins of the plan; the last program of a row finds its token there.

    The first `capacity` ids to arrive are listed, all are counted. Not of rows with temperature 0
    or FEW tokens, which `count` has done. A program takes `tiles` blocks: grid (B / tiles, R).
    """
    row = tl.program_id(1).to(tl.int64)
    marks += row * MARKS_
    if (tl.load(temperature + row) > 0.0) & (tl.load(marks + LISTED) > FEW):
        plan += row * PLANNED_
        k_bin, m_bin = tl.load(plan).to(tl.int32), tl.load(plan + 1).to(tl.int32)
        p_first, p_last = tl.load(plan + 2).to(tl.int32), tl.load(plan + 3).to(tl.int32)
        u_first, u_last = tl.load(plan + 4).to(tl.int32), tl.load(plan + 5).to(tl.int32)
        total = tl.load(plan + 6)
        best = tl.load(plan + 7).to(tl.int32).to(tl.float32, bitcast=True)
        hollow = best == NOTHING  # of the row's logits, which `count` then has replaced
        best = tl.where(hollow, 0.0, best)
        last = tl.maximum(p_last, u_last)
        last = tl.maximum(last, tl.where(k_bin < BINS_, k_bin, -1))
        last = tl.maximum(last, tl.where(m_bin < BINS_, m_bin, -1))
        reach = (last + 2).to(tl.float32) / BINS_A_UNIT  # no near token is so far from the best
        ids += row * capacity
        x += row * vocab
        for tile in range(tiles):
            block = tl.program_id(0) * tiles + tile
            own = tl.load(block_best + row * blocks + block, mask=block < blocks, other=NOTHING)
            if hollow | (own > best - reach):
                token = block * BLOCK + tl.arange(0, BLOCK)
                inside = token < vocab
                value = tl.load(x + token, mask=inside, other=NOTHING)
                bin, _weight = weigh(value, best)
                near = (bin == k_bin) | (bin == m_bin) | ((bin >= p_first) & (bin <= p_last))
                near = (near | ((bin >= u_first) & (bin <= u_last))) & inside & (bin < BINS_)
                listed(marks + FOUND, ids, token, near, capacity)
        last_program = tl.num_programs(0) - 1
        tl.debug_barrier()  # before this program says that it is done
        if tl.atomic_add(marks + DONE, 1, sem="acq_rel") == last_program:
            amount = tl.atomic_add(marks + FOUND, 0, sem="relaxed")
            numbers += row * BINS_
            sums += row * BINS_
            k, p = tl.load(top_k + row), tl.load(top_p + row)
            k = tl.where(k < up_to(numbers, BINS_), k, 0)
            distance, u = least_distance(tl.load(min_p + row)), tl.load(uniform + row)
            counted = up_to(sums, BINS_)
            total = tl.where(total < 0, counted, total)
            if amount <= F:
                drawn = _sorted(
                    x, ids, amount, best, k, p, distance, u, total, counted, numbers, sums, F
                ).to(tl.int64)
            else:
                drawn = _searched(
                    x, ids, amount, vocab, capacity, best, k, p, distance, u, total, counted,
                    counts + row * BINS_, numbers, sums, TILE,
                ).to(tl.int64)  # fmt: skip
            tl.store(out + row, tl.maximum(tl.minimum(drawn, vocab - 1), 0))
