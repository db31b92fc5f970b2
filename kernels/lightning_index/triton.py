"""Triton kernel of the indexer's scores over paged keys.

Legend: T tokens, H heads (HB: the next power of two from 16), D width of a key, BT tokens and BK
keys of a program, N columns of a row of the output, UNIT entries of a block or tokens of a pool.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cache_rows.decode import load_rows
from kernels.top_k.triton import keys_of

# Codes of MODE: what a column of the output is.
ENTRIES, MEMBERS, BLOCKS = 0, 1, 2  # an entry; an entry of a named block; the best of a block
MEMBERS_: tl.constexpr = tl.constexpr(MEMBERS)
BLOCKS_: tl.constexpr = tl.constexpr(BLOCKS)


@triton.jit
def _find(table, sequence, entry, shown, sequences, width, pages, shift):
    """Rows (int64) of a pool of pages of 2^shift entries, and which of `shown` exist."""
    slot = entry >> shift
    shown = shown & (entry >= 0) & (slot < width) & (sequence >= 0) & (sequence < sequences)
    page = tl.load(table + sequence * width + slot, mask=shown, other=-1)
    shown = shown & (page >= 0) & (page < pages)
    return (page.to(tl.int64) << shift) + (entry & ((1 << shift) - 1)), shown


@triton.jit
def _store_maxima(maxima, values, row, tile, mask, W, C: tl.constexpr, BEST: tl.constexpr):
    """Keys of the bests of a tile's groups of BEST columns; C columns a tile, W groups a row."""
    best = tl.max(tl.reshape(values, (C // BEST, BEST)), 1)
    group = tile * (C // BEST) + tl.arange(0, C // BEST)
    at = maxima + row * W + group
    tl.store(at, keys_of(best, group < W), mask=mask & (group < W))


@triton.jit(
    do_not_specialize=[
        "T", "H", "blocks", "sequences", "width", "pages", "shift", "least", "factor",
    ]
)  # fmt: skip
def scores(
    q, weights, pool, key_scale, table, sequence_of, lengths, names, out, maxima,
    T, H, N, W, blocks, sequences, width, pages, shift, least, factor,
    D: tl.constexpr, HB: tl.constexpr, FORM: tl.constexpr, ROW: tl.constexpr,
    GROUP: tl.constexpr, E8M0: tl.constexpr, SCALED: tl.constexpr, MODE: tl.constexpr,
    UNIT: tl.constexpr, POOLED: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BEST: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """factor * sum_h w_h relu(q_h . key) of BT tokens and BK columns, -inf for missing keys.

    Keys are read once for consecutive tokens of one sequence. POOLED: lengths are positions p,
    of (p + 1) // UNIT entries. Nothing is stored for tokens of no more than `least` entries,
    nor beyond a token's length: the selection reads neither. With BEST the keys of the best of
    every BEST columns are stored too, for `kernels.top_k`, in rows of W.
    """
    tile = tl.program_id(0)
    first = tl.program_id(1) * BT
    column = tile * BK + tl.arange(0, BK)
    token = first + tl.arange(0, BT)
    length = tl.load(lengths + token, mask=token < T, other=0)
    of = tl.load(sequence_of + token, mask=token < T, other=-1)
    if POOLED:
        length = (length + 1) // UNIT
    longest = tl.max(length, 0)
    d = tl.arange(0, D)
    h = tl.arange(0, HB)
    head = h < H
    start = first
    stop = tl.minimum(first + BT, T)
    if (longest <= least) | ((MODE != MEMBERS_) & (longest <= tile * BK)):
        stop = first
    while start < stop:
        sequence = tl.load(sequence_of + start)
        end = tl.min(tl.where((token > start) & (of != sequence), token, stop), 0)
        entry = column
        shown = column < longest
        if MODE == MEMBERS_:
            slot = column // UNIT
            block = tl.load(
                names + start.to(tl.int64) * blocks + slot, mask=slot < blocks, other=-1
            )
            entry = tl.where(block >= 0, block * UNIT + column % UNIT, -1)
            shown = (entry >= 0) & (entry < longest)
        row, shown = _find(table, sequence, entry, shown, sequences, width, pages, shift)
        # From a branch, so that the compiler does not see the width of codes: it would read the
        # operands of the product in an order that costs three moves for each instruction.
        keys = tl.zeros((BK, D), tl.bfloat16)
        if sequence >= 0:
            keys = load_rows(pool, row, shown, BK, D, FORM, ROW, GROUP, E8M0, PTX)
        if SCALED and BT > 1:
            multiplier = tl.load(key_scale + row, mask=shown, other=0.0)
        for t in tl.range(start, end, num_stages=STAGES):
            token_64 = start.to(tl.int64) + (t - start)
            at = token_64 * H + h
            q_tile = tl.load(q + at[:, None] * D + d[None, :], mask=head[:, None], other=0.0)
            weight = tl.load(weights + at, mask=head, other=0.0)
            count = tl.load(lengths + token_64)
            if POOLED:
                count = (count + 1) // UNIT
            if SCALED and BT == 1:
                multiplier = tl.load(key_scale + row, mask=shown, other=0.0)
            products = tl.dot(keys, tl.trans(q_tile.to(tl.bfloat16)))
            total = tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1) * factor
            if SCALED:
                total *= multiplier
            total = tl.where(shown & (entry < count), total, float("-inf"))
            at_out = out + token_64 * N
            if MODE == BLOCKS_:
                best = tl.max(tl.reshape(total, (BK // UNIT, UNIT)), 1)
                place = tile * (BK // UNIT) + tl.arange(0, BK // UNIT)
                newest = (place == (count - 1) // UNIT) & (count > 0)
                best = tl.where(newest, float("inf"), best)
                mask = (place * UNIT < count) & (count > least) & (place < N)
                tl.store(at_out + place, best, mask=mask)
                if BEST:
                    _store_maxima(maxima, best, token_64, tile, count > least, W, BK // UNIT, BEST)
            else:
                mask = (column < N) & (count > least)
                if MODE != MEMBERS_:
                    mask = mask & (column < count)
                if BEST:
                    _store_maxima(maxima, total, token_64, tile, count > least, W, BK, BEST)
                tl.store(at_out + column, total, mask=mask)
        start = end
