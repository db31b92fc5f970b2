"""Triton kernel of latent attention over window rows and entries.

Legend: T tokens, H heads, D values of a row, of which the last TAIL are stored plainly, BH heads
and BK keys that a program takes at a time, S slots of a selection. Constants of the window's rows
begin with W_, those of the entries with E_.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.quant_linear.decode import e2m1_to_bf16, e4m3_to_bf16, times_bf16
from kernels.split_keys import (
    LOG2_E,
    NOTHING,
    closing_factor,
    find_numbers,
    find_pages,
    rows_of,
    store_stats,
    weigh,
)

# Codes of W_FORM and E_FORM.
PLAIN, E4M3, E2M1 = 0, 1, 2
PLAIN_: tl.constexpr = tl.constexpr(PLAIN)
E4M3_: tl.constexpr = tl.constexpr(E4M3)
HEAD_TILE: tl.constexpr = tl.constexpr(16)  # of a tensor core: the fewest heads of a program
# bf16 bits of 2^126, which takes out the bias of decoded e2m1.
E2M1_UNIT: tl.constexpr = tl.constexpr(2.0**126)


@triton.jit
def held(keys, PTX: tl.constexpr):
    """bf16 `keys`. Not pure, so that they are decoded once and not in the layout of each dot."""
    if PTX:
        keys = tl.inline_asm_elementwise(
            asm="mov.b32 $0, $1;",
            constraints="=r,r",
            args=[keys],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=2,
        )
    return keys


@triton.jit
def _times_plus(x, factor, y, unit, PTX: tl.constexpr):
    """x * factor + y * unit in bf16, two at a time; one of both products is 0."""
    if PTX:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 t;
            mov.b32 t, 0x80008000;
            fma.rn.bf16x2 t, $1, $2, t;
            fma.rn.bf16x2 $0, $3, $4, t;
            }""",
            constraints="=r,r,r,r,r",
            args=[x, factor, y, unit],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return x * factor + y * unit


@triton.jit
def _fetch(
    pool, tails, row, BK: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr, FORM: tl.constexpr,
    ROW: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """What is stored of the rows [BK]: codes or values, scale bytes, plain values. -1 gives 0.

    Codes have a dimension for the group, so that its scale lies beside them.
    """
    shown = row >= 0
    row = row.to(tl.int64)
    if FORM == PLAIN_:
        at = row[:, None] * ROW + tl.arange(0, D)[None, :]
        code = tl.load(pool + at, mask=shown[:, None], other=0.0).to(tl.bfloat16)
        scale = shown
    else:
        # The group of plain values is read too, and its scale from the padding: both count as 0.
        BYTES: tl.constexpr = GROUP if FORM == E4M3_ else GROUP // 2
        group = tl.arange(0, D // GROUP)
        place = group[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
        start = pool + row * ROW
        code = tl.load(start[:, None, None] + place[None, :, :], mask=shown[:, None, None], other=0)
        at = (D - TAIL) // GROUP * BYTES + 2 * TAIL + group
        scale = tl.load(start[:, None] + at[None, :], mask=shown[:, None], other=0)
    if TAIL > 0:
        at = row[:, None] * (ROW // 2) + ((D - TAIL) // 2 + tl.arange(0, TAIL))[None, :]
        tail = tl.load(tails + at, mask=shown[:, None], other=0.0)
    else:
        tail = shown
    return code, scale, tail


@triton.jit
def _decode(
    code, scale, tail, BK: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, E8M0: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """bf16 [BK, D] of what was fetched, exact."""
    if FORM == PLAIN_:
        return code
    else:
        BYTES: tl.constexpr = GROUP if FORM == E4M3_ else GROUP // 2
        if TAIL > 0:
            scale = tl.where((tl.arange(0, D // GROUP) < (D - TAIL) // GROUP)[None, :], scale, 0)
        if E8M0:
            scale = (scale.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True)
        else:
            scale = e4m3_to_bf16(scale, PTX)
        scale = tl.broadcast_to(scale[:, :, None], (BK, D // GROUP, BYTES))
        if FORM == E4M3_:
            keys = e4m3_to_bf16(code, PTX)
            if TAIL > 0:
                unit = (tl.arange(0, D // GROUP) == D // GROUP - 1).to(tl.bfloat16)
                unit = tl.broadcast_to(unit[None, :, None], (BK, D // GROUP, BYTES))
                tail = tl.broadcast_to(tail[:, None, :], (BK, D // GROUP, BYTES))
                keys = _times_plus(keys, scale, tail, unit, PTX)
            else:
                keys = times_bf16(keys, scale, PTX)
        else:
            unit = tl.full(code.shape, E2M1_UNIT, tl.float32).to(tl.bfloat16)
            low, high = e2m1_to_bf16(code, unit, PTX)
            keys = tl.join(times_bf16(low, scale, PTX), times_bf16(high, scale, PTX))
        return held(tl.reshape(keys, (BK, D)), PTX)


@triton.jit
def _attend(q, keys, shown, scale, acc, top, total):
    """Take BK keys, which are values too, into the running sums.

    Logits of many heads are made as [BK, BH], so that a warp has all keys of its heads, as it has
    their sums in both products: with heads first, the compiler repeats the logits in every warp.
    """
    if q.shape[0] == HEAD_TILE:
        logits = tl.dot(q, tl.trans(keys)) * scale
        weights, fade, top, total = weigh(logits, shown[None, :], top, total, 1)
        weights = weights.to(tl.bfloat16)
    else:
        logits = tl.dot(keys, tl.trans(q)) * scale
        weights, fade, top, total = weigh(logits, shown[:, None], top, total, 0)
        weights = tl.trans(weights.to(tl.bfloat16))
    return tl.dot(weights, keys, acc * fade[:, None]), top, total


@triton.jit
def _attend_all(
    q, acc, top, total, pool, tails, table, selected, sequence, first, start, count, scale,
    splits, sequences, width, pages, shift,
    D: tl.constexpr, TAIL: tl.constexpr, FORM: tl.constexpr, ROW: tl.constexpr,
    GROUP: tl.constexpr, E8M0: tl.constexpr, NAMED: tl.constexpr, BK: tl.constexpr,
    COPIES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Take the blocks start, start + splits and so on of `count` keys.

    Row numbers are loaded two blocks ahead and pages one block, so that no load waits for another;
    the compiler does so with the rows themselves.
    """
    number = find_numbers(selected, first, start, count, NAMED, BK, COPIES)
    page = find_pages(table, sequence, number, number >= 0, sequences, width, shift)
    next_number = find_numbers(selected, first, start + splits, count, NAMED, BK, COPIES)
    for j in tl.range(start, tl.cdiv(count, BK), splits):
        row, shown = rows_of(page, number, pages, shift)
        row = tl.max(tl.where(shown, row, -1).to(tl.int32), 1)
        page = find_pages(table, sequence, next_number, next_number >= 0, sequences, width, shift)
        number = next_number & ((1 << shift) - 1)  # in its page
        next_number = find_numbers(selected, first, j + 2 * splits, count, NAMED, BK, COPIES)
        code, code_scale, tail = _fetch(pool, tails, row, BK, D, TAIL, FORM, ROW, GROUP)
        keys = _decode(code, code_scale, tail, BK, D, TAIL, FORM, GROUP, E8M0, PTX)
        acc, top, total = _attend(q, keys, row >= 0, scale, acc, top, total)
    return acc, top, total


@triton.jit(
    do_not_specialize=[
        "heads", "scale", "splits", "sequences", "slots", "w_width", "w_pages", "w_shift",
        "e_width", "e_pages", "e_shift",
    ],
    # Slices of longer tensors, whose elements are loaded one by one.
    do_not_specialize_on_alignment=[
        "sequence_of", "first_of", "last_of", "visible_of", "selected",
    ],
)  # fmt: skip
def sparse_attention(
    q, out, values, stats, sinks, sequence_of, first_of, last_of, visible_of, selected,
    window, window_tails, window_table, entries, entry_tails, entry_table,
    heads, scale, splits, sequences, slots, w_width, w_pages, w_shift, e_width, e_pages, e_shift,
    D: tl.constexpr, TAIL: tl.constexpr,
    W_FORM: tl.constexpr, W_ROW: tl.constexpr, W_GROUP: tl.constexpr, W_E8M0: tl.constexpr,
    E_FORM: tl.constexpr, E_ROW: tl.constexpr, E_GROUP: tl.constexpr, E_E8M0: tl.constexpr,
    WINDOW: tl.constexpr, ENTRIES: tl.constexpr, SELECTED: tl.constexpr, SINK: tl.constexpr,
    BH: tl.constexpr, BK: tl.constexpr, COPIES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One token, BH heads and one split of the keys: window blocks first, then entry blocks."""
    head_tiles = tl.cdiv(heads, BH)
    token = (tl.program_id(0) // head_tiles).to(tl.int64)
    head = tl.program_id(0) % head_tiles * BH + tl.arange(0, BH)
    split = tl.program_id(1)
    head_mask = head < heads
    d = tl.arange(0, D)
    at = (token * heads + head)[:, None] * D
    q_tile = tl.load(q + at + d[None, :], mask=head_mask[:, None], other=0.0).to(tl.bfloat16)
    sequence = tl.load(sequence_of + token)
    acc = tl.zeros((BH, D), tl.float32)
    top = tl.full((BH,), NOTHING, tl.float32)
    total = tl.zeros((BH,), tl.float32)
    blocks = 0
    if WINDOW:
        first = tl.load(first_of + token)
        count = tl.load(last_of + token) + 1 - first
        # No range is longer than the table, whatever it says.
        count = tl.minimum(tl.maximum(count, 0), w_width.to(tl.int64) << w_shift).to(tl.int32)
        blocks = tl.cdiv(count, BK)
        acc, top, total = _attend_all(
            q_tile, acc, top, total, window, window_tails, window_table, selected, sequence, first,
            split, count, scale, splits, sequences, w_width, w_pages, w_shift, D, TAIL, W_FORM,
            W_ROW, W_GROUP, W_E8M0, False, BK, COPIES, PTX,
        )  # fmt: skip
    if ENTRIES:
        if SELECTED:
            count = slots
        else:
            count = tl.maximum(tl.load(visible_of + token), 0)
            count = tl.minimum(count, e_width.to(tl.int64) << e_shift).to(tl.int32)
        # The first entry block follows the last window block in the deal.
        start = (split + splits - blocks % splits) % splits
        acc, top, total = _attend_all(
            q_tile, acc, top, total, entries, entry_tails, entry_table,
            selected + token * slots, sequence, 0, start, count, scale, splits, sequences, e_width,
            e_pages, e_shift, D, TAIL, E_FORM, E_ROW, E_GROUP, E_E8M0, SELECTED, BK, COPIES,
            PTX,
        )  # fmt: skip
    if splits > 1:
        whole = token * heads + head
        store_stats(stats, top, total, whole, head_mask, split, splits)
        kept = values + (whole * splits + split)[:, None] * D + d[None, :]
        tl.store(kept, acc, mask=(head_mask & (total > 0.0))[:, None])
    else:
        sink = tl.full((BH,), -float("inf"), tl.float32)
        if SINK:
            sink = tl.load(sinks + head, mask=head_mask, other=0.0).to(tl.float32) * LOG2_E
        o = acc * closing_factor(top, total, sink)[:, None]
        tl.store(out + at + d[None, :], o.to(out.dtype.element_ty), mask=head_mask[:, None])
