"""Triton kernels of paged attention and of writes to pages.

Legend: T tokens, H query heads, G key heads, D head dim, M rows (a token with one of the H / G
query heads of a key head) and BK keys that a program takes at a time, S slots of a selection, X
elements of a row that is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.split_keys import NOTHING, closing_factor, find_rows, store_stats, weigh

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
def _rows(
    table, selected, sequence, block, count, sequences, width, pages, shift,
    SELECTED: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """int32 [BK]: the pool's rows of a block of keys, -1 where there is none."""
    number = block * BK + tl.arange(0, BK)
    shown = number < count
    if SELECTED:
        number = tl.load(selected + number, mask=shown, other=-1).to(tl.int32)
    row, shown = find_rows(table, sequence, number, shown, sequences, width, pages, shift)
    return tl.where(shown, row, -1).to(tl.int32)


@triton.jit
def _attend(
    q_tile, k_pool, v_pool, table, selected, sequence, last, count, key_heads, scale, acc, top,
    total, sequences, width, pages, shift, split,
    D: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """Take the blocks split, split + SPLITS and so on of `count` keys of one sequence.

    Row m sees the keys up to last[m], none where that is -1. The pool's rows of a block are found
    while the block before it is multiplied.
    """
    d = tl.arange(0, D)
    n = tl.arange(0, BK)
    row = _rows(
        table, selected, sequence, split, count, sequences, width, pages, shift, SELECTED, BK
    )
    for block in tl.range(split, tl.cdiv(count, BK), SPLITS):
        shown = row >= 0
        at = (row.to(tl.int64) * key_heads)[:, None] * D + d[None, :]
        k = tl.load(k_pool + at, mask=shown[:, None], other=0.0).to(tl.bfloat16)
        v = tl.load(v_pool + at, mask=shown[:, None], other=0.0).to(tl.bfloat16)
        first = 0 if SELECTED else block * BK
        seen = shown[None, :] & ((first + n)[None, :] <= last[:, None])
        logits = tl.dot(q_tile, tl.trans(k))
        if q_tile.shape[0] >= MANY_ROWS:
            # Behind a transpose the compiler does not see that the products follow each other:
            # else each warp takes all rows in both, and reads all queries for its keys.
            logits = tl.trans(tl.trans(logits) * scale)
        else:
            logits = logits * scale
        weights, fade, top, total = weigh(logits, seen, top, total)
        acc = tl.dot(weights.to(tl.bfloat16), v, acc * fade[:, None])
        row = _rows(
            table, selected, sequence, block + SPLITS, count, sequences, width, pages, shift,
            SELECTED, BK,
        )  # fmt: skip
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
    ONE: tl.constexpr, SELECTED: tl.constexpr, GATED: tl.constexpr,
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
        last = tl.where(mine, MOST if SELECTED else position, -1)
        acc, top, total = _attend(
            q_tile, k_pool, v_pool, table, selected, sequence, last, count, key_heads, scale, acc,
            top, total, sequences, width, pages, shift, split, D, BK, SPLITS, SELECTED,
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
