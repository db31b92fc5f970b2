"""Triton kernel that adds up weights by bins and finds where prefixes may end; see
`kernels.sampling.triton`.

Legend: R rows, V vocabulary, B blocks of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.ordered.triton import draw_at, drawn_of, in_order, least_sum, listed
from kernels.sampling.triton import (
    BINS_,
    BINS_A_UNIT,
    COUNT_SHIFT,
    COUNTED,
    LISTED,
    LOG2_E,
    MARKS_,
    NOTHING,
    REACH,
    allowed_by,
    best_token,
    units_of,
    weigh,
)
from kernels.top_k.triton import key_of, number_of

ONE_UNITS: tl.constexpr = tl.constexpr(17592186044416.0)  # 2^44
SLACK: tl.constexpr = tl.constexpr(0.01)  # of a distance, beyond what rounding can do
# Words of a row's plan, int64: bins in which prefixes may end (BINS or -1 for none) and in which
# the token may lie, the units of all tokens (-1: of all that are counted), bits of the best logit.
PLANNED = 8
PLANNED_: tl.constexpr = tl.constexpr(PLANNED)
PAIR: tl.constexpr = tl.constexpr(16)  # two bins share a word
PAIR_MASK: tl.constexpr = tl.constexpr(2**16 - 1)


@triton.jit
def find(sums, target):
    """The first bin whose running sum exceeds the target; BINS where none does."""
    return tl.sum((sums <= target).to(tl.int32), 0)


@triton.jit
def _find_two(sums, first, second):
    """As `find`, of two targets."""
    both = (sums <= first).to(tl.int32) + ((sums <= second).to(tl.int32) << PAIR)
    both = tl.sum(both, 0)
    return both & PAIR_MASK, both >> PAIR


@triton.jit
def up_to(sums, bin):
    """A running sum in memory at a bin, 0 before the first and of all behind the last."""
    return tl.load(sums + tl.minimum(bin, BINS_ - 1), mask=bin >= 0, other=0)


@triton.jit
def least_distance(min_p):
    """The distance up to which min-p keeps tokens."""
    off = min_p <= 0.0
    return tl.where(off, REACH, tl.maximum(-tl.log(tl.where(off, 1.0, min_p)), 0.0))


@triton.jit
def _least_of_top(best, k):
    """The k-th of the bests of blocks: as many tokens are at or above it."""
    key = tl.sort(key_of(best), descending=True)
    place = tl.arange(0, best.shape[0])
    return number_of(tl.sum(tl.where(place == k - 1, key, 0), 0))


@triton.jit
def _last_bin(total, vocab, p, distance, u):
    """The last bin that matters without top-k: behind it the prefix has ended.

    All tokens behind a distance d weigh less than V exp(-d), the best being 1. Where that is less
    than is left out by top-p, or follows the drawn token, the end or the token is not there.
    """
    share = tl.where(p < 1.0, (1.0 - p).to(tl.float64), 1.0 - u)
    share = tl.where((p >= 1.0) & (distance < REACH), 0.0, share)
    room = (share * total / vocab).to(tl.float32)
    far = tl.where(room > 0.0, SLACK - tl.log(tl.where(room > 0.0, room, 1.0)), REACH)
    far = tl.minimum(tl.maximum(far, 0.0), distance)
    return tl.minimum(far * BINS_A_UNIT, BINS_ - 1.0).to(tl.int32)


@triton.jit
def _plan(plan, counts, numbers, sums, row, k, p, distance, u, all_units, best):
    """Find the bins that the end of each prefix, and the drawn token, may be in.

    Stores the running sums of number and of units.
    """
    bins = tl.arange(0, BINS_)
    packed = tl.load(counts + row * BINS_ + bins, cache_modifier=".cg")
    number = packed >> COUNT_SHIFT
    q = packed - (number << COUNT_SHIFT)
    number_sums = tl.cumsum(number.to(tl.int32), 0)
    unit_sums = tl.cumsum((q.to(tl.float64) * units_of(bins)).to(tl.int64), 0)
    numbers += row * BINS_
    sums += row * BINS_
    tl.store(numbers + bins, number_sums)
    tl.store(sums + bins, unit_sums)
    tl.debug_barrier()
    counted = up_to(sums, BINS_)
    total = tl.where(all_units < 0, counted, all_units)
    low, high, k_bin = total, total, tl.full((), BINS_, tl.int32)
    if (k > 0) & (k < up_to(numbers, BINS_)):
        k_bin = find(number_sums, k - 1)
        low, high = up_to(sums, k_bin - 1), up_to(sums, k_bin)
    p_first, p_last = tl.full((), BINS_, tl.int32), tl.full((), -1, tl.int32)
    if p < 1.0:
        first = tl.minimum(least_sum(p, low), counted) - 1
        second = tl.minimum(least_sum(p, high), counted) - 1
        p_first, p_last = _find_two(unit_sums, first, second)
        low = tl.minimum(low, up_to(sums, p_first - 1))
        high = tl.minimum(high, up_to(sums, p_last))
    m_bin = tl.full((), BINS_, tl.int32)
    if distance < REACH:
        m_bin = (distance * BINS_A_UNIT).to(tl.int32)
        low = tl.minimum(low, up_to(sums, m_bin - 1))
        high = tl.minimum(high, up_to(sums, m_bin))
    u_first, u_last = _find_two(unit_sums, draw_at(u, low, counted), draw_at(u, high, counted))
    plan += row * PLANNED_
    tl.store(plan, k_bin.to(tl.int64))
    tl.store(plan + 1, m_bin.to(tl.int64))
    tl.store(plan + 2, p_first.to(tl.int64))
    tl.store(plan + 3, p_last.to(tl.int64))
    tl.store(plan + 4, u_first.to(tl.int64))
    tl.store(plan + 5, u_last.to(tl.int64))
    tl.store(plan + 6, all_units)
    tl.store(plan + 7, best.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit(do_not_specialize=["blocks", "capacity", "mask_rows", "tiles"])
def count(
    x, temperature, top_k, top_p, min_p, uniform, block_best, block_sum, block_id, masks, mask_of,
    counts, marks, plan, numbers, sums, ids, out, vocab, blocks, capacity, mask_rows, tiles,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Number and sum of q of the tokens in each bin; the last program of a row makes its plan, or
    finds its token if F tokens or fewer are counted.

    Tokens that are certain to be behind all ends and the drawn token are left out: of top-k those
    below the k-th best of the blocks' bests (then at least k others are counted, and neither
    numbers nor sums behind the k-th are looked at), of the rest those of bins behind the last one
    that matters. Where a row has no logit left, what its mask allows gets the logit 0. Rows with
    temperature 0 take their best token. A program takes `tiles` blocks: grid (B / tiles, R).
    """
    row = tl.program_id(1).to(tl.int64)
    if tl.load(temperature + row) > 0.0:
        at = tl.arange(0, BLOCKS)
        bests = tl.load(block_best + row * blocks + at, mask=at < blocks, other=NOTHING)
        weights = tl.load(block_sum + row * blocks + at, mask=at < blocks, other=0.0)
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        distance = least_distance(tl.load(min_p + row))
        u = tl.load(uniform + row)
        best = tl.max(bests, 0)
        hollow = best == NOTHING
        least = tl.full((), NOTHING, tl.float32)
        last = tl.full((), BINS_ - 1, tl.int32)
        all_units = tl.full((), -1, tl.int64)
        if (k > 0) & (k < vocab):
            if k <= blocks:
                least = _least_of_top(bests, k)
        elif not hollow:
            scaled = tl.where(weights > 0.0, weights * tl.exp2((bests - best) * LOG2_E), 0.0)
            total = tl.sum(scaled, 0).to(tl.float64)
            last = _last_bin(total, vocab, p, distance, u)
            all_units = (total * ONE_UNITS).to(tl.int64)
        ids += row * capacity
        marks += row * MARKS_
        few = tl.full((), 1, tl.int32)
        zero = tl.where(hollow, 0.0, best)
        for tile in range(tiles):
            block = tl.program_id(0) * tiles + tile
            own = tl.load(block_best + row * blocks + block, mask=block < blocks, other=NOTHING)
            near = (own >= least) & (own > best - (last + 2).to(tl.float32) / BINS_A_UNIT)
            if hollow | near:
                token = block * BLOCK + tl.arange(0, BLOCK)
                inside = token < vocab
                value = tl.load(x + row * vocab + token, mask=inside, other=NOTHING)
                if hollow:
                    words = (vocab + 31) // 32
                    allowed = allowed_by(masks, mask_of, row, token, inside, mask_rows, words)
                    value = tl.where(inside & allowed, 0.0, NOTHING)
                    tl.store(x + row * vocab + token, value, mask=inside)
                bin, q = weigh(value, zero)
                one = tl.full((BLOCK,), 1, tl.int64) << COUNT_SHIFT
                counted = inside & (bin <= last) & (value >= least)
                tl.atomic_add(counts + row * BINS_ + bin, one + q, mask=counted, sem="relaxed")
                if few > 0:
                    few = listed(marks + LISTED, ids, token, counted, F)
        last_program = tl.num_programs(0) - 1
        tl.debug_barrier()  # before this program says that it is done
        if tl.atomic_add(marks + COUNTED, 1, sem="acq_rel") == last_program:
            amount = tl.atomic_add(marks + LISTED, 0, sem="relaxed")
            if amount <= F:
                token, value, bin, q = in_order(x + row * vocab, ids, amount, zero, F)
                weight = (q.to(tl.float64) * units_of(bin)).to(tl.int64)
                place = tl.arange(0, F)
                before = tl.cumsum(weight, 0) - weight
                units = tl.sum(weight, 0)
                total = tl.where(all_units < 0, units, all_units)
                cut = tl.where(k < amount, k, 0)
                drawn = drawn_of(
                    token, zero - value, weight, before, place, place < amount, total, units, cut,
                    p, distance, u, tl.zeros((), tl.int64), F,
                )  # fmt: skip
                if amount == 0:
                    drawn = best_token(block_best, block_id, row, blocks, vocab, BLOCKS)
                tl.store(out + row, drawn.to(tl.int64))
            else:
                _plan(plan, counts, numbers, sums, row, k, p, distance, u, all_units, best)
    elif tl.program_id(0) == 0:
        chosen = best_token(block_best, block_id, row, blocks, vocab, BLOCKS)
        tl.store(out + row, chosen.to(tl.int64))
