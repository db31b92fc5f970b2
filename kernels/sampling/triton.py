"""Triton kernels that choose tokens from logits without sorting them.

Order of tokens: by logit, largest first, equal ones by id. Top-k, top-p and min-p each keep a
prefix of that order, and a token is drawn by inversion of the running sum along it.

With d the distance to the row's best (scaled) logit, bin floor(64 d) of 2048 holds a token; one
with d >= 32 has no weight. Within its bin a token weighs q = round(2^24 exp(bin / 64 - d)), and a
bin's q count 2^20 exp(-bin / 64) units each: 2^44 units are the weight of the best token. All sums
that programs add to are of integers, hence exact whatever their order. Three launches over all
rows: `adjust`; `count`, whose last program of a row finds the few bins in which a prefix may end
or the drawn token may lie; `collect`, whose last program of a row finds the token among those of
these bins.

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
Q_MASK: tl.constexpr = tl.constexpr(2**44 - 1)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOTHING: tl.constexpr = tl.constexpr(float("-inf"))
# Counters of a row: programs of `count` and of `collect` that are done, tokens each has listed.
MARKS = 4
MARKS_: tl.constexpr = tl.constexpr(MARKS)
COUNTED: tl.constexpr = tl.constexpr(0)
DONE: tl.constexpr = tl.constexpr(1)
LISTED: tl.constexpr = tl.constexpr(2)
FOUND: tl.constexpr = tl.constexpr(3)


@triton.jit
def allowed_by(masks, mask_of, row, token, inside, mask_rows, words):
    """Bits of the row's mask; a row without one, or with a number out of range, allows all."""
    number = tl.load(mask_of + row)
    masked = (number >= 0) & (number < mask_rows)
    at = number.to(tl.int64) * words + (token >> 5)
    word = tl.load(masks + at, mask=inside & masked, other=-1)
    return ((word >> (token & 31)) & 1) != 0


@triton.jit
def _listed(x, token, ids, row, count, value):
    """x + value for tokens in the row's list of `count` ids."""
    for i in range(count):
        x = tl.where(token == tl.load(ids + row * count + i), x + value, x)
    return x


@triton.jit
def _uniform(seed, position):
    """A number in [0, 1), fp64, of Philox4x32-10 with key `seed` and counter `position`."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    zero = low * 0
    first, second, _, _ = tl.philox(seed, low, high, zero, zero)
    high_bits = (first >> 5).to(tl.int64) * (1 << 26)
    return (high_bits + (second >> 6).to(tl.int64)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit(
    do_not_specialize=["slots", "bias_slots", "mask_rows", "drafts_each", "banned_each", "seeded"]
)
def adjust(
    logits, temperature, repetition, presence, frequency, history, bias, slot_of, masks, mask_of,
    drafts, banned, seeds, positions, x, block_best, block_sum, block_id, counts, marks, uniform,
    vocab, row_stride, slots, bias_slots, mask_rows, drafts_each, banned_each, seeded,
    BLOCK: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """x = logits with all that a row's settings say, over its temperature; of each block its best
    and the weight of all against the best.

    Also clears what the next launches add to, and draws the row's random number where `seeded`.
    Settings that a call lacks have no slots, masks or ids. Grid (B, R). x of greedy rows is not
    written.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    value = tl.load(logits + row * row_stride + token, mask=inside, other=NOTHING).to(tl.float32)
    slot = tl.load(slot_of + row).to(tl.int64)
    at = slot * vocab + token
    value += tl.load(bias + at, mask=inside & (slot >= 0) & (slot < bias_slots), other=0.0)
    value = _listed(value, token, banned, row, banned_each, NOTHING)
    kept = inside & (slot >= 0) & (slot < slots)
    seen = tl.load(history + at, mask=kept, other=0)
    seen = tl.where(kept, _listed(seen, token, drafts, row, drafts_each, 2), 0)
    if slots > 0:
        times = (seen >> 1).to(tl.float32)
        factor = tl.load(repetition + row)
        repeated = tl.where(value > 0.0, tl.div_rn(value, factor), value * factor)
        value = tl.where(seen != 0, repeated, value)
        value -= tl.load(frequency + row) * times
        value -= tl.where(times > 0.0, tl.load(presence + row), 0.0)
    words = (vocab + 31) // 32
    allowed = inside & allowed_by(masks, mask_of, row, token, inside, mask_rows, words)
    value = tl.where(allowed, value, NOTHING)
    heat = tl.load(temperature + row)
    value = tl.div_rn(value, tl.where(heat > 0.0, heat, 1.0)) + 0.0  # no negative zero
    best = _store_best(block_best, block_id, value, token, allowed, row, vocab)
    if heat > 0.0:
        tl.store(x + row * vocab + token, value, mask=inside)
        weight = tl.exp2((value - tl.where(best == NOTHING, 0.0, best)) * LOG2_E)
        tl.store(block_sum + row * tl.num_programs(0) + block, tl.sum(weight, 0))
    place = block * CLEARED + tl.arange(0, CLEARED)
    zeros = tl.zeros((CLEARED,), tl.int64)
    tl.store(counts + row * BINS_ + place, zeros, mask=place < BINS_)
    if block == 0:
        mark = tl.arange(0, MARKS_)
        tl.store(marks + row * MARKS_ + mark, tl.zeros((MARKS_,), tl.int32))
        if seeded != 0:
            drawn = _uniform(tl.load(seeds + row), tl.load(positions + row))
            tl.store(uniform + row, drawn)


@triton.jit
def _store_best(block_best, block_id, value, token, allowed, row, vocab):
    """The largest value of a block, and the lowest allowed id that has it (or `vocab`)."""
    best = tl.max(value, 0)
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(block_best + at, best)
    tl.store(block_id + at, tl.min(tl.where(allowed & (value == best), token, vocab), 0))
    return best


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
    q = (tl.exp2(rest * -LOG2_E) * ONE_Q + 0.5).to(tl.int32).to(tl.int64)
    return tl.where(has_weight, bin, BINS_), q


@triton.jit
def units_of(bin):
    """Units of one q of a bin, fp64."""
    return tl.exp2(bin.to(tl.float32) * (-LOG2_E / BINS_A_UNIT)).to(tl.float64) * UNITS_A_Q


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
