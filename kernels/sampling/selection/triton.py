"""Triton kernels that find the ends of prefixes and the drawn token; see `kernels.sampling.triton`.

Legend: R rows, V vocabulary, B blocks of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.ordered.triton import cut_of, in_order, value_at
from kernels.sampling.triton import (
    BINS_,
    BINS_A_UNIT,
    COUNT_SHIFT,
    NOTHING,
    REACH,
    best_logit,
    best_token,
    units_of,
    weigh,
)


@triton.jit
def _find(sums, target):
    """The first bin whose running sum exceeds the target; BINS where none does."""
    return tl.sum((sums <= target).to(tl.int32), 0)


@triton.jit
def _at(values, bin):
    """values[bin]; 0 beyond."""
    return tl.sum(tl.where(tl.arange(0, BINS_) == bin, values, 0), 0)


@triton.jit
def _sums(counts, row):
    """Of each bin: number and q (int64), and the running sums of number and of units."""
    bins = tl.arange(0, BINS_)
    packed = tl.load(counts + row * BINS_ + bins)
    number = packed >> COUNT_SHIFT
    q = packed - (number << COUNT_SHIFT)
    units = (q.to(tl.float64) * units_of(bins)).to(tl.int64)
    return number, q, units, tl.cumsum(number, 0), tl.cumsum(units, 0)


@triton.jit
def _least_sum(top_p, total):
    """What the running sum must reach for a top-p set of `total` units, at least 1."""
    exact = top_p.to(tl.float64) * total.to(tl.float64)
    floor = exact.to(tl.int64)
    return tl.maximum(floor + (floor.to(tl.float64) < exact).to(tl.int64), 1)


@triton.jit
def _draw_at(uniform, total):
    """The running sum that the drawn token is the first to exceed."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _least_distance(min_p):
    """The distance up to which min-p keeps tokens."""
    off = min_p <= 0.0
    return tl.where(off, REACH, tl.maximum(-tl.log(tl.where(off, 1.0, min_p)), 0.0))


@triton.jit
def _uniform(seed, position):
    """A number in [0, 1), fp64, of Philox4x32-10 with key `seed` and counter `position`."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    zero = low * 0
    first, second, _, _ = tl.philox(seed, low, high, zero, zero)
    high_bits = (first >> 5).to(tl.int64) * (1 << 26)
    return (high_bits + (second >> 6).to(tl.int64)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _row_uniform(uniform, seeds, positions, row, SEEDED: tl.constexpr):
    if SEEDED:
        return _uniform(tl.load(seeds + row), tl.load(positions + row))
    else:
        return tl.load(uniform + row)


@triton.jit(do_not_specialize=["blocks", "capacity"])
def collect(
    x, temperature, top_k, top_p, min_p, uniform, seeds, positions, block_best, counts, found,
    ids, vocab, blocks, capacity,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr, SEEDED: tl.constexpr,
):  # fmt: skip
    """Ids of the tokens in bins that may hold the end of a prefix or the drawn token.

    Grid (B / TILES, R). `found` counts all of them, `ids` holds the first `capacity` to arrive.
    """
    row = tl.program_id(1).to(tl.int64)
    if tl.load(temperature + row) > 0.0:
        number, _q, units, numbers, sums = _sums(counts, row)
        total, k = tl.sum(units, 0), tl.load(top_k + row).to(tl.int64)
        low, high, k_bin = total, total, tl.full((), BINS_, tl.int32)
        if (k > 0) & (k < tl.sum(number, 0)):
            k_bin = _find(numbers, k - 1)
            high = _at(sums, k_bin)
            low = high - _at(units, k_bin)
        p = tl.load(top_p + row)
        p_first, p_last = tl.full((), BINS_, tl.int32), tl.full((), -1, tl.int32)
        if p < 1.0:
            p_first = _find(sums, _least_sum(p, low) - 1)
            p_last = _find(sums, _least_sum(p, high) - 1)
            low = tl.minimum(low, _at(sums, p_first) - _at(units, p_first))
            high = tl.minimum(high, _at(sums, p_last))
        distance = _least_distance(tl.load(min_p + row))
        m_bin = tl.full((), BINS_, tl.int32)
        if distance < REACH:
            m_bin = (distance * BINS_A_UNIT).to(tl.int32)
            low = tl.minimum(low, _at(sums, m_bin) - _at(units, m_bin))
            high = tl.minimum(high, _at(sums, m_bin))
        u = _row_uniform(uniform, seeds, positions, row, SEEDED)
        u_first, u_last = _find(sums, _draw_at(u, low)), _find(sums, _draw_at(u, high))
        best = best_logit(block_best, row, blocks, BLOCKS)
        hollow = best == NOTHING  # of the row's logits, which `count` then has replaced
        best = tl.where(hollow, 0.0, best)
        last = tl.maximum(p_last, tl.where(u_last < BINS_, u_last, -1))
        last = tl.maximum(last, tl.where(k_bin < BINS_, k_bin, -1))
        last = tl.maximum(last, tl.where(m_bin < BINS_, m_bin, -1))
        reach = (last + 2).to(tl.float32) / BINS_A_UNIT  # no near token is so far from the best
        for tile in range(TILES):
            block = tl.program_id(0) * TILES + tile
            block_most = tl.load(
                block_best + row * blocks + block, mask=block < blocks, other=NOTHING
            )
            token = block * BLOCK + tl.arange(0, BLOCK)
            inside = token < tl.where(hollow | (best - block_most < reach), vocab, 0)
            value = tl.load(x + row * vocab + token, mask=inside, other=NOTHING)
            bin, _weight = weigh(value, best)
            near = (bin == k_bin) | (bin == m_bin) | ((bin >= p_first) & (bin <= p_last))
            near = (near | ((bin >= u_first) & (bin <= u_last))) & inside & (bin < BINS_)
            chosen = near.to(tl.int32)
            amount = tl.sum(chosen, 0)
            if amount > 0:
                start = tl.atomic_add(found + row, amount, sem="relaxed")
                place = start + tl.cumsum(chosen, 0) - chosen
                at = ids + row * capacity + place
                tl.store(at, token, mask=near & (place < capacity))


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
def _within(target, sums, units, q, bin, cut_bin, cut_q):
    """`target` of a running sum of units as one of q within its bin, inside the kept prefix."""
    rest = (target - (_at(sums, bin) - _at(units, bin))).to(tl.float64)
    most = _at(q, bin)
    most = tl.where(bin == cut_bin, tl.minimum(most, cut_q), most) - 1
    inner = (rest / units_of(bin)).to(tl.int64)
    return tl.maximum(tl.minimum(inner, most), 0)


@triton.jit
def _reached(sums, units, bin, q):
    """Units up to and including q within a bin."""
    inner = (q.to(tl.float64) * units_of(bin)).to(tl.int64)
    return _at(sums, bin) - _at(units, bin) + inner


@triton.jit
def _drawn(
    x, ids, amount, vocab, capacity, best, k, p, distance, u, counts, row,
    FEW: tl.constexpr, F: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The token of a row, -1 where none is kept. FEW: at most F are listed."""
    number, q, units, numbers, sums = _sums(counts, row)
    if FEW:
        token, value, of, q_of, running = in_order(x, ids, amount, best, F)
    # The kept prefix: its units, and the bin and q within it where it ends.
    kept = tl.sum(units, 0)
    cut_bin, cut_q = tl.full((), BINS_, tl.int32), tl.full((), 0, tl.int64)
    if (k > 0) & (k < tl.sum(number, 0)):
        cut_bin = _find(numbers, k - 1)
        inner = k - 1 - (_at(numbers, cut_bin) - _at(number, cut_bin))
        if FEW:
            _, cut_q = cut_of(of, q_of, running, cut_bin, inner, True, F)
        else:
            _, _, cut_q = _cut(x, ids, amount, capacity, vocab, cut_bin, best, inner, True, TILE)
        kept = _reached(sums, units, cut_bin, cut_q)
    if p < 1.0:
        target = _least_sum(p, kept) - 1
        bin = _find(sums, target)
        # The first q that reaches target + 1 is the first to exceed the q of target.
        inner = _within(target, sums, units, q, bin, cut_bin, cut_q)
        if FEW:
            _, cut_q = cut_of(of, q_of, running, bin, inner, False, F)
        else:
            _, _, cut_q = _cut(x, ids, amount, capacity, vocab, bin, best, inner, False, TILE)
        cut_bin, kept = bin, _reached(sums, units, bin, cut_q)
    if distance < REACH:
        bin = (distance * BINS_A_UNIT).to(tl.int32)
        if FEW:
            inner = tl.sum(tl.where((of == bin) & (best - value <= distance), q_of, 0), 0)
        else:
            inner = _near_q(x, ids, amount, capacity, vocab, bin, best, distance, TILE)
        reached = _reached(sums, units, bin, inner)
        if reached < kept:
            kept, cut_bin, cut_q = reached, bin, inner
    chosen = tl.full((), -1, tl.int64)
    if kept > 0:
        target = _draw_at(u, kept)
        bin = _find(sums, target)
        inner = _within(target, sums, units, q, bin, cut_bin, cut_q)
        if FEW:
            at, _ = cut_of(of, q_of, running, bin, inner, False, F)
            chosen = value_at(token, at, F).to(tl.int64)
        else:
            key, equal, _ = _cut(x, ids, amount, capacity, vocab, bin, best, inner, False, TILE)
            chosen = _equal_id(x, ids, amount, capacity, vocab, bin, best, key, equal, TILE)
    return chosen


@triton.jit(do_not_specialize=["blocks", "capacity"])
def choose(
    x, temperature, top_k, top_p, min_p, uniform, seeds, positions, block_best, block_id, counts,
    found, ids, out, vocab, blocks, capacity,
    BLOCKS: tl.constexpr, F: tl.constexpr, TILE: tl.constexpr, SEEDED: tl.constexpr,
):  # fmt: skip
    """The token of each row. Grid (R,). Greedy rows take the best one."""
    row = tl.program_id(0).to(tl.int64)
    chosen = best_token(block_best, block_id, row, blocks, vocab, BLOCKS).to(tl.int64)
    if tl.load(temperature + row) > 0.0:
        best = best_logit(block_best, row, blocks, BLOCKS)
        best = tl.where(best == NOTHING, 0.0, best)
        x += row * vocab
        ids += row * capacity
        amount, k = tl.load(found + row), tl.load(top_k + row).to(tl.int64)
        p = tl.load(top_p + row)
        distance = _least_distance(tl.load(min_p + row))
        u = _row_uniform(uniform, seeds, positions, row, SEEDED)
        if amount <= F:
            drawn = _drawn(
                x, ids, amount, vocab, capacity, best, k, p, distance, u, counts, row, True, F, TILE
            )
        else:
            drawn = _drawn(
                x, ids, amount, vocab, capacity, best, k, p, distance, u, counts, row, False, F,
                TILE,
            )  # fmt: skip
        chosen = tl.where(drawn >= 0, drawn, chosen)
    tl.store(out + row, tl.maximum(tl.minimum(chosen, vocab - 1), 0))
