"""Triton kernels of paged attention and of writes to pages.

Legend: T tokens, H query heads, G key heads, D head dim, M rows (a token with one of the H / G
query heads of a key head) and BK keys that a program takes at a time, S slots of a selection, X
elements of a row that is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.split_keys import (
    NOTHING,
    closing_factor,
    find_numbers,
    find_pages,
    find_rows,
    rows_of,
    store_stats,
    weigh,
)

MOST: tl.constexpr = tl.constexpr(2**31 - 1)  # behind every key
MANY_ROWS: tl.constexpr = tl.constexpr(64)


@triton.jit
def find_runs(sequence_of, token, mask, starts, sequences):
    """The sequences int32 [M] of `token` [M], ascending, and the numbers [M] of their runs.

    A run is tokens of one sequence that follow each other; the first is number 1, and rows out of
    `mask` are in none, 0. `starts` are the rows that are the first of their token. A sequence out
    of range becomes -1.
    """
    sequence = tl.load(sequence_of + token, mask=mask, other=-1)
    sequence = tl.where((sequence >= 0) & (sequence < sequences), sequence, -1).to(tl.int32)
    inner = mask & starts & (token > tl.min(token, 0))
    before = tl.load(sequence_of + token - 1, mask=inner, other=-1)
    before = tl.where((before >= 0) & (before < sequences), before, -1).to(tl.int32)
    run = 1 + tl.cumsum((inner & (sequence != before)).to(tl.int32), 0)
    return sequence, tl.where(mask, run, 0)


@triton.jit
def _attend(
    q_tile, k_pool, v_pool, table, selected, sequence, last, count, key_heads, scale, acc, top,
    total, sequences, width, pages, shift, split,
    D: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, ONE: tl.constexpr,
    SELECTED: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Take the blocks split, split + SPLITS and so on of `count` keys of one sequence.

    Row m sees the keys up to last[m], none where that is -1; the rows of ONE token see all keys.
    Numbers are loaded two blocks ahead and pages one block, so that no load waits for another.
    Logits of many rows are made as [BK, M], so that a warp has all keys of its rows.
    """
    d = tl.arange(0, D)
    n = tl.arange(0, BK)
    number = find_numbers(selected, 0, split, count, SELECTED, BK, COPIES)
    page = find_pages(table, sequence, number, number >= 0, sequences, width, shift)
    next_number = find_numbers(selected, 0, split + SPLITS, count, SELECTED, BK, COPIES)
    for block in tl.range(split, tl.cdiv(count, BK), SPLITS):
        if not SELECTED:  # rather than kept in registers
            number = find_numbers(selected, 0, block, count, SELECTED, BK, COPIES)
            next_number = find_numbers(selected, 0, block + SPLITS, count, SELECTED, BK, COPIES)
        row, shown = rows_of(page, number, pages, shift)
        row = tl.max(tl.where(shown, row, -1).to(tl.int32), 1)
        shown = row >= 0
        page = find_pages(table, sequence, next_number, next_number >= 0, sequences, width, shift)
        if SELECTED:
            number = next_number & ((1 << shift) - 1)  # in its page
            next_number = find_numbers(selected, 0, block + 2 * SPLITS, count, SELECTED, BK, COPIES)
        at = row.to(tl.int64) * key_heads * D
        k_at = (k_pool + at)[:, None] + d[None, :]
        v_at = (v_pool + at)[:, None] + d[None, :]
        k = tl.load(k_at, mask=shown[:, None], other=0.0).to(tl.bfloat16)
        v = tl.load(v_at, mask=shown[:, None], other=0.0).to(tl.bfloat16)
        key = tl.where(shown, block * BK + n, MOST)
        if ONE:
            logits = tl.dot(q_tile, tl.trans(k)) * scale
            weights, fade, top, total = weigh(logits, shown[None, :], top, total, 1)
            weights = weights.to(tl.bfloat16)
        elif q_tile.shape[0] < MANY_ROWS:
            logits = tl.dot(q_tile, tl.trans(k)) * scale
            seen = key[None, :] <= last[:, None]
            weights, fade, top, total = weigh(logits, seen, top, total, 1)
            weights = weights.to(tl.bfloat16)
        else:
            logits = tl.dot(k, tl.trans(q_tile)) * scale
            seen = key[:, None] <= last[None, :]
            weights, fade, top, total = weigh(logits, seen, top, total, 0)
            weights = tl.trans(weights.to(tl.bfloat16))
        acc = tl.dot(weights, v, acc * fade[:, None])
    return acc, top, total


@triton.jit(
    do_not_specialize=[
        "tokens", "heads", "group", "per_tile", "slots", "sequences", "width", "pages", "shift",
        "scale",
    ]
)  # fmt: skip
def paged_attention(
    q, k_pool, v_pool, out, values, stats, gate, table, sequence_of, position_of, selected,
    tokens, heads, group, per_tile, slots, sequences, width, pages, shift, gate_token, gate_head,
    scale,
    D: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    ONE: tl.constexpr, SELECTED: tl.constexpr, GATED: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """`per_tile` tokens, one key head with its `group` query heads, one split of the keys.

    The runs of the tile are dealt to the programs of the last grid dimension. Later tiles, which
    see more keys, come first. ONE: `per_tile` is 1, as it is where tokens have selections.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    key_heads = tl.num_programs(1) // SPLITS
    key_head = tl.program_id(1) // SPLITS
    k_pool += key_head * D
    v_pool += key_head * D
    selected += tile.to(tl.int64) * slots
    split = tl.program_id(1) % SPLITS
    row = tl.arange(0, M)
    token = tile * per_tile + row // group
    mask = (row < per_tile * group) & (token < tokens)
    sequence_row, run = find_runs(sequence_of, token, mask, row % group == 0, sequences)
    position = tl.load(position_of + token, mask=mask, other=-1)
    position = tl.minimum(position, (width.to(tl.int64) << shift) - 1).to(tl.int32)
    whole = token.to(tl.int64) * heads + key_head * group + row % group
    d = tl.arange(0, D)
    at = whole[:, None] * D + d[None, :]
    q_tile = tl.load(q + at, mask=mask[:, None], other=0.0).to(tl.bfloat16)
    acc = tl.zeros((M, D), tl.float32)
    top = tl.full((M,), NOTHING, tl.float32)
    total = tl.zeros((M,), tl.float32)
    # Of one token the compiler knows the only run, and drops the loop.
    first_run = 1 if ONE else 1 + tl.program_id(2)
    last_run = 1 if ONE else tl.max(run, 0)
    step = 1 if ONE else tl.num_programs(2)
    for r in range(first_run, last_run + 1, step):
        mine = run == r
        sequence = tl.max(tl.where(mine, sequence_row, -1), 0)
        count = 1 + tl.max(tl.where(mine & (sequence_row >= 0), position, -1), 0)
        if SELECTED:
            count = tl.minimum(count, slots)
        last = tl.where(mine, position, -1)
        acc, top, total = _attend(
            q_tile, k_pool, v_pool, table, selected, sequence, last, count, key_heads, scale, acc,
            top, total, sequences, width, pages, shift, split, D, BK, SPLITS, ONE, SELECTED, COPIES,
        )  # fmt: skip
    mask = (run > 0) & ((run - 1) % tl.num_programs(2) == tl.program_id(2))
    if SPLITS > 1:
        store_stats(stats, top, total, whole, mask, split, SPLITS)
        mask = mask & (total > 0.0)
        at = (whole * SPLITS + split)[:, None] * D + d[None, :]
        tl.store(values + at, acc, mask=mask[:, None])
    else:
        o = acc * closing_factor(top, total, tl.full((M,), -float("inf"), tl.float32))[:, None]
        if GATED:
            head = key_head * group + row % group
            gate_at = token.to(tl.int64) * gate_token + head * gate_head
            g = tl.load(gate + gate_at[:, None] + d[None, :], mask=mask[:, None], other=0.0)
            o *= tl.sigmoid(g.to(tl.float32))
        tl.store(out + at, o.to(out.dtype.element_ty), mask=mask[:, None])


@triton.jit(do_not_specialize=["sequences", "width", "pages", "shift"])
def write_rows(
    rows, pool, table, sequence_of, position_of, X, sequences, width, pages, shift,
    RATIO: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """pool[entry position // RATIO of the token's sequence] = rows[t], where the token is the
    last of its RATIO tokens.
    """
    token = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * BX + tl.arange(0, BX)
    position = tl.load(position_of + token)
    sequence = tl.load(sequence_of + token)
    shown = (position >= 0) & ((position + 1) % RATIO == 0)
    row, shown = find_rows(
        table, sequence, position // RATIO, shown, sequences, width, pages, shift
    )
    mask = shown & (x < X)
    value = tl.load(rows + token * X + x, mask=mask, other=0)
    tl.store(pool + row * X + x, value.to(pool.dtype.element_ty), mask=mask)
