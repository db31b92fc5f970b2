"""Triton kernels of paged attention and of writes to pages.

Legend: T tokens, H query heads, G key heads, D head dim, M rows (a token with one of the H / G
query heads of a key head) and BK keys that a program takes at a time, S slots of a selection, X
elements of a row that is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.paged_attention.configs import MANY_ROWS
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
MANY_ROWS_: tl.constexpr = tl.constexpr(MANY_ROWS)


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
        elif q_tile.shape[0] < MANY_ROWS_:
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
    position = tl.minimum(position, (width.to(tl.int64) << shift) - 1)
    position = tl.maximum(position, -1).to(tl.int32)
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


@triton.jit
def load_parts(rows, mask, W: tl.constexpr, PARTS: tl.constexpr):
    """PARTS tiles [n, W] in bf16, W columns after the other, of the rows that begin at pointers
    [n, 1]; 0 out of `mask`.
    """
    column = tl.arange(0, W)[None, :]
    parts = ()
    for i in tl.static_range(PARTS):
        part = tl.load(rows + column + i * W, mask=mask, other=0.0)
        parts += (part.to(tl.bfloat16),)  # type: ignore[assignment]
    return parts


@triton.jit
def first_of(row, stride):
    """Offsets [n, 1], uint64, of the first elements of rows [n], int32 from 0."""
    return (row.to(tl.uint32).to(tl.uint64) * stride.to(tl.uint32).to(tl.uint64))[:, None]


@triton.jit
def _products(x_parts, y_parts, PARTS: tl.constexpr):
    """x y^T, summed over the parts."""
    sums = tl.dot(x_parts[0], tl.trans(y_parts[0]))
    for i in tl.static_range(1, PARTS):
        sums = tl.dot(x_parts[i], tl.trans(y_parts[i]), sums)
    return sums


@triton.jit
def _add(q_parts, k, v, seen, scale, acc, top, total, PARTS: tl.constexpr):
    """Add a block of keys to the sums of few rows; `total` [M, BK] keeps those of each place."""
    logits = tl.where(seen, _products(q_parts, k, PARTS) * scale, -float("inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    weights = tl.exp2(logits - new_top[:, None])
    fade = tl.exp2(top - new_top)
    acc = _add_values(weights.to(tl.bfloat16), v, acc, fade, PARTS)
    return acc, new_top, total * fade[:, None] + weights


@triton.jit
def _add_values(weights, v, acc, fade, PARTS: tl.constexpr):
    sums = ()
    for i in tl.static_range(PARTS):
        sums += (tl.dot(weights, v[i], acc[i] * fade[:, None]),)  # type: ignore[assignment]
    return sums


@triton.jit
def _finish(
    acc, top, total, out, gate, mask,
    W: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store the sums over their weights, gated, at the rows that pointers `out` [M, 1] begin."""
    factor = closing_factor(top, total, tl.full(top.shape, -float("inf"), tl.float32))[:, None]
    column = tl.arange(0, W)[None, :]
    for i in tl.static_range(PARTS):
        o = acc[i] * factor
        if GATED:
            g = tl.load(gate + column + i * W, mask=mask, other=0.0)
            o *= tl.sigmoid(g.to(tl.float32))
        tl.store(out + column + i * W, o.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slots", "sequences", "width", "pages", "shift"])
def resolve_rows(
    selected, table, sequence_of, position_of, rows, slots, padded, sequences, width, pages, shift,
    BX: tl.constexpr,
):  # fmt: skip
    """rows[t, x] int32 = the pool row of position selected[t, x]; -1 where there is none, and up to
    `padded`.
    """
    token = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * BX + tl.arange(0, BX)
    sequence = tl.load(sequence_of + token)
    shown = (x < slots) & (x <= tl.load(position_of + token))
    number = tl.load(selected + token * slots + x, mask=shown, other=-1)
    row, shown = find_rows(table, sequence, number, shown, sequences, width, pages, shift)
    tl.store(rows + token * padded + x, tl.where(shown, row, -1).to(tl.int32), mask=x < padded)


@triton.jit(do_not_specialize=["heads", "group", "scale"])
def attend_rows(
    q, k_pool, v_pool, out, gate, position_of, rows, again, heads, group, padded, gate_token,
    gate_head, scale,
    D: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A token and a key head with its `group` query heads, over the pool rows [padded] of the
    token: int32, -1 where there is none, and a block of BK behind the last.

    `again` is equal to `rows`: of two loads each thread has the rows that it copies and those that
    it weighs, and none are passed between threads.
    """
    W: tl.constexpr = D // PARTS
    token = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1)
    stride = tl.num_programs(1) * D
    k_pool += key_head * D
    v_pool += key_head * D
    rows += token * padded + tl.arange(0, BK)
    again += token * padded + tl.arange(0, BK)
    head = tl.arange(0, M)
    mask = (head < group)[:, None]
    head += key_head * group
    first = ((token * heads + head) * D)[:, None]
    q_parts = load_parts(q + first, mask, W, PARTS)
    acc = ()
    for _ in tl.static_range(PARTS):
        acc += (tl.zeros((M, W), tl.float32),)  # type: ignore[assignment]
    top = tl.full((M,), NOTHING, tl.float32)
    total = tl.zeros((M, BK), tl.float32)
    count = tl.minimum(tl.load(position_of + token) + 1, padded - BK)
    count = tl.maximum(count, 0).to(tl.int32)
    row = tl.load(rows)
    weighed = tl.load(again)
    for block in tl.range(1, 1 + tl.cdiv(count, BK)):
        at = first_of(row, stride)
        shown = (row >= 0)[:, None]
        k = load_parts(k_pool + at, shown, W, PARTS)
        v = load_parts(v_pool + at, shown, W, PARTS)
        seen = (weighed >= 0)[None, :]
        row = tl.load(rows + block * BK)
        weighed = tl.load(again + block * BK)
        acc, top, total = _add(q_parts, k, v, seen, scale, acc, top, total, PARTS)
    gate += (token * gate_token + head * gate_head)[:, None]
    _finish(acc, top, tl.sum(total, 1), out + first, gate, mask, W, GATED, PARTS)


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
