"""Triton kernels that choose tokens from logits without sorting them.

Order of tokens: by logit, largest first, equal ones by id. Top-k, top-p and min-p each keep a
prefix of that order, and a token is drawn by inversion of the running sum along it.

With d the distance to the row's best (scaled) logit, bin floor(64 d) of 2048 holds a token; one
with d >= 32 has no weight. Within its bin a token weighs q = round(2^24 exp(bin / 64 - d)), and a
bin's q count 2^20 exp(-bin / 64) units each: 2^44 units are the weight of the best token. All sums
are of integers, hence exact whatever their order. Four launches over all rows: `adjust`, `count`,
`collect` (the few bins in which a prefix may end or the drawn token may lie), `choose` (which
bisects the bits of the collected logits, then the ids of equal ones).

Legend: R rows, V vocabulary, B blocks of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

BINS = 2048
BINS_: tl.constexpr = tl.constexpr(BINS)
BINS_A_UNIT: tl.constexpr = tl.constexpr(64.0)
REACH: tl.constexpr = tl.constexpr(32.0)  # BINS / BINS_A_UNIT
ONE_Q: tl.constexpr = tl.constexpr(16777216.0)  # 2^24
UNITS_A_Q: tl.constexpr = tl.constexpr(1048576.0)  # 2^20
COUNT_SHIFT: tl.constexpr = tl.constexpr(44)  # a packed sum has q below, the count above
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOTHING: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def _allowed(masks, mask_of, row, token, inside, mask_rows, words):
    """Bits of the row's mask; a row without one, or with a number out of range, allows all."""
    number = tl.load(mask_of + row)
    masked = (number >= 0) & (number < mask_rows)
    at = number.to(tl.int64) * words + (token >> 5)
    word = tl.load(masks + at, mask=inside & masked, other=-1)
    return ((word >> (token & 31)) & 1) != 0


@triton.jit
def _listed(x, token, ids, row, COUNT: tl.constexpr, value):
    """x + value for tokens in the row's list of COUNT ids."""
    for i in tl.static_range(COUNT):
        x = tl.where(token == tl.load(ids + row * COUNT + i), x + value, x)
    return x


@triton.jit(do_not_specialize=["slots", "mask_rows"])
def adjust(
    logits, temperature, repetition, presence, frequency, history, bias, slot_of, masks, mask_of,
    drafts, banned, x, block_best, block_id, counts, found, vocab, row_stride, slots, mask_rows,
    BLOCK: tl.constexpr, CLEARED: tl.constexpr, HISTORY: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, DRAFTS: tl.constexpr, BANNED: tl.constexpr,
):  # fmt: skip
    """x = logits with all that a row's settings say, over its temperature; the best of each block.

    Also clears what `count` and `collect` add to. Grid (B, R). x of greedy rows is not written.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    value = tl.load(logits + row * row_stride + token, mask=inside, other=NOTHING).to(tl.float32)
    if HISTORY or BIAS:
        slot = tl.load(slot_of + row).to(tl.int64)
        kept = inside & (slot >= 0) & (slot < slots)
    if BIAS:
        value += tl.load(bias + slot * vocab + token, mask=kept, other=0.0)
    value = _listed(value, token, banned, row, BANNED, NOTHING)
    if HISTORY:
        seen = tl.load(history + slot * vocab + token, mask=kept, other=0)
        seen = tl.where(kept, _listed(seen, token, drafts, row, DRAFTS, 2), 0)
        times = (seen >> 1).to(tl.float32)
        factor = tl.load(repetition + row)
        repeated = tl.where(value > 0.0, tl.div_rn(value, factor), value * factor)
        value = tl.where(seen != 0, repeated, value)
        value -= tl.load(frequency + row) * times
        value -= tl.where(times > 0.0, tl.load(presence + row), 0.0)
    allowed = inside
    if MASK:
        words = (vocab + 31) // 32
        allowed &= _allowed(masks, mask_of, row, token, inside, mask_rows, words)
        value = tl.where(allowed, value, NOTHING)
    heat = tl.load(temperature + row)
    value = tl.div_rn(value, tl.where(heat > 0.0, heat, 1.0)) + 0.0  # no negative zero
    if heat > 0.0:
        tl.store(x + row * vocab + token, value, mask=inside)
    _store_best(block_best, block_id, value, token, allowed, row, vocab)
    place = block * CLEARED + tl.arange(0, CLEARED)
    zeros = tl.zeros((CLEARED,), tl.int64)
    tl.store(counts + row * BINS_ + place, zeros, mask=place < BINS_)
    tl.store(found + row, 0, mask=block == 0)


@triton.jit
def _store_best(block_best, block_id, value, token, allowed, row, vocab):
    """The largest value of a block, and the lowest allowed id that has it (or `vocab`)."""
    best = tl.max(value, 0)
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(block_best + at, best)
    tl.store(block_id + at, tl.min(tl.where(allowed & (value == best), token, vocab), 0))


@triton.jit
def best_logit(block_best, row, blocks, BLOCKS: tl.constexpr):
    """The row's best logit."""
    at = tl.arange(0, BLOCKS)
    values = tl.load(block_best + row * blocks + at, mask=at < blocks, other=NOTHING)
    return tl.max(values, 0)


@triton.jit
def best_token(block_best, block_id, row, blocks, vocab, BLOCKS: tl.constexpr):
    """The lowest id among the best logits of a row; 0 where it has none."""
    at = tl.arange(0, BLOCKS)
    values = tl.load(block_best + row * blocks + at, mask=at < blocks, other=NOTHING)
    ids = tl.load(block_id + row * blocks + at, mask=at < blocks, other=0)
    first = tl.min(tl.where((at < blocks) & (values == tl.max(values, 0)), ids, vocab), 0)
    return tl.where(first < vocab, first, 0)


@triton.jit
def weigh(x, best):
    """Bin of a token (BINS where it has no weight) and q."""
    distance = best - x
    has_weight = distance < REACH
    distance = tl.where(has_weight, distance, 0.0)
    bin = (distance * BINS_A_UNIT).to(tl.int32)
    rest = distance - bin.to(tl.float32) / BINS_A_UNIT
    q = (tl.exp2(rest * -LOG2_E) * ONE_Q + 0.5).to(tl.int64)
    return tl.where(has_weight, bin, BINS_), q


@triton.jit
def units_of(bin):
    """Units of one q of a bin, fp64."""
    return tl.exp2(bin.to(tl.float32) * (-LOG2_E / BINS_A_UNIT)).to(tl.float64) * UNITS_A_Q


@triton.jit
def _least_of_top(block_best, row, blocks, k, BLOCKS: tl.constexpr):
    """The k-th of the bests of blocks: as many tokens are at or above it. -inf for k = 0 and for
    more than there are blocks.
    """
    at = tl.arange(0, BLOCKS)
    best = tl.load(block_best + row * blocks + at, mask=at < blocks, other=NOTHING)
    left, right = best[:, None], best[None, :]
    earlier = (right > left) | ((right == left) & (at[None, :] < at[:, None]))
    rank = tl.sum(earlier.to(tl.int32), 1)
    return tl.max(tl.where(rank == k - 1, best, NOTHING), 0)


@triton.jit(do_not_specialize=["blocks", "mask_rows"])
def count(
    x, temperature, top_k, block_best, masks, mask_of, counts, vocab, blocks, mask_rows,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Number and sum of q of the tokens in each bin. Grid (B, R).

    Tokens that are certain to be beyond top-k are left out: then at least k others are counted,
    and neither numbers nor sums behind the k-th are looked at. Where a row has no logit left, what
    its mask allows gets the logit 0.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(temperature + row) > 0.0:
        best = best_logit(block_best, row, blocks, BLOCKS)
        least = _least_of_top(block_best, row, blocks, tl.load(top_k + row), BLOCKS)
        hollow = best == NOTHING
        if hollow | (tl.load(block_best + row * blocks + block) >= least):
            token = block * BLOCK + tl.arange(0, BLOCK)
            inside = token < vocab
            value = tl.load(x + row * vocab + token, mask=inside, other=NOTHING)
            if hollow:
                allowed = inside
                if MASK:
                    words = (vocab + 31) // 32
                    allowed &= _allowed(masks, mask_of, row, token, inside, mask_rows, words)
                value = tl.where(allowed, 0.0, NOTHING)
                best = 0.0
                tl.store(x + row * vocab + token, value, mask=inside)
            bin, q = weigh(value, best)
            one = tl.full((BLOCK,), 1, tl.int64) << COUNT_SHIFT
            at = counts + row * BINS_ + bin
            counted = inside & (bin < BINS_) & (value >= least)
            tl.atomic_add(at, one + q, mask=counted, sem="relaxed")


@triton.jit
def best_of_blocks(logits, block_best, block_id, vocab, row_stride, BLOCK: tl.constexpr):
    """The best logit of each block. Grid (B, R)."""
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    value = tl.load(logits + row * row_stride + token, mask=inside, other=NOTHING).to(tl.float32)
    _store_best(block_best, block_id, value, token, inside, row, vocab)


@triton.jit(do_not_specialize=["blocks"])
def best_of_row(block_best, block_id, out, vocab, blocks, BLOCKS: tl.constexpr):
    """The best token of each row. Grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    chosen = best_token(block_best, block_id, row, blocks, vocab, BLOCKS)
    tl.store(out + row, chosen.to(tl.int64))
