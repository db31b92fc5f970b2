"""Steps that attention kernels over dealt keys share, and the kernel that merges their splits.

Legend: BH rows (heads) and BK keys that a program takes at a time, D width of a value.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOTHING: tl.constexpr = tl.constexpr(-1e30)  # stands for minus infinity, and subtracts to 0
LEAST: tl.constexpr = tl.constexpr(1e-30)  # below any sum of weights: the largest weight is 1


@triton.jit
def find_numbers(
    selected, first, block, count, NAMED: tl.constexpr, BK: tl.constexpr, COPIES: tl.constexpr
):
    """[BK, COPIES]: row numbers of a block of keys, -1 where there is none.

    Key n is row number first + n, or selected[n] where NAMED. All copies are equal. They let
    threads share the search: a load of [BK] the compiler repeats in every layout that needs it.
    """
    key = block * BK + tl.arange(0, BK)[:, None] + tl.zeros((1, COPIES), tl.int32)
    shown = key < count
    if NAMED:
        return tl.load(selected + key, mask=shown, other=-1).to(tl.int64)
    else:
        return tl.where(shown, first + key, -1)


@triton.jit
def find_pages(table, sequence, number, shown, sequences, width, shift):
    """Entries of a page table [sequences, width] for the row numbers that are `shown`, else -1.

    A page has 2^shift rows. Sequences and row numbers out of range are left out, never followed.
    """
    slot = number >> shift
    shown = shown & (number >= 0) & (slot < width) & (sequence >= 0) & (sequence < sequences)
    return tl.load(table + sequence.to(tl.int64) * width + slot, mask=shown, other=-1)


@triton.jit
def rows_of(page, number, pages, shift):
    """64-bit rows of a pool of `pages` pages, and which of them exist."""
    row = (page.to(tl.int64) << shift) + (number & ((1 << shift) - 1))
    return row, (page >= 0) & (page < pages)


@triton.jit
def find_rows(table, sequence, number, shown, sequences, width, pages, shift):
    """64-bit rows of a pool, and which of `shown` exist: both steps above at once."""
    page = find_pages(table, sequence, number, shown, sequences, width, shift)
    return rows_of(page, number, pages, shift)


@triton.jit
def weigh(logits, shown, top, total, AXIS: tl.constexpr):
    """One step of the running softmax over base-2 logits, `shown` of a like shape, keys on AXIS.

    Returns fp32 weights like the logits, the factor of what was summed before, top and total.
    Hidden logits are -inf and `top` never is, so that their weights are 0.
    """
    logits = tl.where(shown, logits, -float("inf"))
    new_top = tl.maximum(top, tl.max(logits, AXIS))
    weights = tl.exp2(logits - tl.expand_dims(new_top, AXIS))
    fade = tl.exp2(top - new_top)
    return weights, fade, new_top, total * fade + tl.sum(weights, AXIS)


@triton.jit
def closing_factor(top, total, sink):
    """What the sum of values is multiplied by; a sink (base 2) is one more logit, of no value."""
    best = tl.maximum(top, sink)
    part = tl.exp2(top - best)
    return part / tl.maximum(total * part + tl.exp2(sink - best), LEAST)


@triton.jit
def store_stats(stats, top, total, row, mask, split, splits):
    """What a split keeps beside its values; `row` (int64) counts heads over all tokens."""
    at = stats + row * (2 * splits) + split
    tl.store(at, top, mask=mask)
    tl.store(at + splits, total, mask=mask)


@triton.jit(do_not_specialize=["heads", "gate_token", "gate_head"])
def merge(
    values, stats, sinks, gate, out, heads, gate_token, gate_head,
    D: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, SINK: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """out[t, h] = sum of splits over their weights and the sink's, times sigmoid(gate)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < D
    split = tl.arange(0, SPLITS)
    top = tl.load(stats + row * (2 * SPLITS) + split)
    total = tl.load(stats + row * (2 * SPLITS) + SPLITS + split)
    sink = tl.load(sinks + row % heads).to(tl.float32) * LOG2_E if SINK else -float("inf")
    best = tl.max(top, 0)
    weight = tl.exp2(top - best)
    factor = closing_factor(best, tl.sum(total * weight, 0), sink)
    at = (row * SPLITS + split)[:, None] * D + column[None, :]
    # Read before it is known which splits have keys: what the others keep may be anything.
    part = tl.load(values + at, mask=column_mask[None, :], other=0.0)
    part = tl.where((total > 0.0)[:, None], part, 0.0)
    o = tl.sum(part * weight[:, None], 0) * factor
    if GATED:
        gate_at = (row // heads) * gate_token + (row % heads) * gate_head + column
        o *= tl.sigmoid(tl.load(gate + gate_at, mask=column_mask, other=0.0).to(tl.float32))
    tl.store(out + row * D + column, o.to(out.dtype.element_ty), mask=column_mask)
