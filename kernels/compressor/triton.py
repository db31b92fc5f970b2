"""Triton kernels of compressed entries: pooling of windows, and the entries' way into the pool.

Legend: T tokens, W state writes, B sequences, D width of an entry, X = D, or 2 D where windows
overlap, r = RATIO tokens of a window, SPAN tokens and BD channels of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cache_rows.triton import place_of, store_rows
from kernels.hadamard.triton import rotate

# Codes of ROUND: the compute type that steps round to.
FP32, BF16, FP16 = 0, 1, 2
BF16_: tl.constexpr = tl.constexpr(BF16)
FP16_: tl.constexpr = tl.constexpr(FP16)


@triton.jit
def _sequence_of(starts, token, B, CHUNK: tl.constexpr):
    """The sequence of a packed token: how many end at or before it."""
    found = token * 0
    for first in range(0, B, CHUNK):
        b = first + tl.arange(0, CHUNK)
        stop = tl.load(starts + 1 + b, mask=b < B, other=9223372036854775807)
        found += tl.sum((stop <= token).to(tl.int64), 0)
    return found


@triton.jit
def _pool(rows, scores, state, start, stop, fresh, X, D, mask, UNROLL: tl.constexpr):
    """Running sums (largest score, weights, rows) after the tokens from `start` to `stop` - 1.

    They begin as `state` says, or, if `fresh`, with the first token. rows, scores and state point
    at the program's channels. Every token is added by the same operations, which change nothing
    where there is none: its score is -inf.
    """
    goes_on = mask & (fresh == 0)
    top = tl.where(mask, tl.load(state, mask=goes_on, other=float("-inf")), 0.0)
    total = tl.load(state + D, mask=goes_on, other=0.0)
    pooled = tl.load(state + 2 * D, mask=goes_on, other=0.0)
    rows += start * X
    scores += start * X
    count = (stop - start).to(tl.int32)
    for base in range(0, count, UNROLL):
        loaded = ()  # before the first sum waits for one of them
        for u in tl.static_range(UNROLL):
            live = mask & (base + u < count)
            score = tl.load(scores + (base + u) * X, mask=live, other=float("-inf"))
            row = tl.load(rows + (base + u) * X, mask=live, other=0.0)
            loaded += ((score, row),)  # type: ignore[assignment]
        for u in tl.static_range(UNROLL):
            score, row = loaded[u]
            new_top = tl.maximum(top, score)
            kept = tl.exp(top - new_top)
            new = tl.exp(score - new_top)
            total = tl.fma(total, kept, new)
            pooled = tl.fma(pooled, kept, new * row)
            top = new_top
    return top, total, pooled


@triton.jit
def _store_state(at, top, total, pooled, D, mask):
    tl.store(at, top, mask=mask)
    tl.store(at + D, total, mask=mask)
    tl.store(at + 2 * D, pooled, mask=mask)


@triton.jit
def _pool_to(
    rows, scores, state, starts, positions, token, out, T, B, D, d,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, ENTRY: tl.constexpr, UNROLL: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the entry that the token closes, zeros if none, or the state after the token.

    | tokens of the step | last window, A | open window |
    |---|---|---|
    | from its first on | pooled here | pooled here |
    | from its middle on | pooled on from A of the open state | pooled on from the open state |
    | none, the open window begins | A of the open state | pooled here |
    | none, the open window goes on | A of the last state | pooled on from the open state |
    """
    inside = d < D
    X = D * (2 if OVERLAP else 1)
    known = (token >= 0) & (token < T)
    position = tl.load(positions + token, mask=known, other=-1)
    b = _sequence_of(starts, token, B, CHUNK)
    wanted = known & (position >= 0) & (b < B)
    place = position % RATIO
    if ENTRY:
        wanted = wanted & (place == RATIO - 1)
    begin_step = tl.load(starts + b, mask=wanted, other=0)
    begin = token - place
    start = tl.maximum(begin, begin_step)
    stop = tl.where(wanted, token + 1, start)
    mask = inside & wanted
    fresh = (begin >= begin_step).to(tl.int32)
    held = state + b * ((9 if OVERLAP else 3) * D) + d
    if OVERLAP:
        last_start = tl.maximum(begin - RATIO, begin_step)
        last_stop = tl.where(wanted, tl.maximum(begin, last_start), last_start)
        last_fresh = (begin - RATIO >= begin_step).to(tl.int32)
        series = tl.where(begin < begin_step, 0, 3 * D)
        a_top, a_total, a_pooled = _pool(
            rows + d, scores + d, held + series, last_start, last_stop, last_fresh, X, D, mask,
            UNROLL,
        )  # fmt: skip
        top, total, pooled = _pool(
            rows + D + d, scores + D + d, held + 6 * D, start, stop, fresh, X, D, mask, UNROLL
        )
        if ENTRY:
            has_a = a_total > 0
            best = tl.maximum(tl.where(has_a, a_top, float("-inf")), top)
            a = tl.where(has_a, tl.exp(a_top - best), 0.0)
            share = tl.exp(top - best)
            weight = a_total * a + total * share
            entry = (a_pooled * a + pooled * share) / tl.where(wanted, weight, 1.0)
            tl.store(out, tl.where(wanted, entry, 0.0), mask=inside)
        else:
            open_top, open_total, open_pooled = _pool(
                rows + d, scores + d, held + 3 * D, start, stop, fresh, X, D, mask, UNROLL
            )
            _store_state(out, a_top, a_total, a_pooled, D, inside)
            _store_state(out + 3 * D, open_top, open_total, open_pooled, D, inside)
            _store_state(out + 6 * D, top, total, pooled, D, inside)
    else:
        top, total, pooled = _pool(
            rows + d, scores + d, held, start, stop, fresh, X, D, mask, UNROLL
        )
        if ENTRY:
            entry = pooled / tl.where(wanted, total, 1.0)
            tl.store(out, tl.where(wanted, entry, 0.0), mask=inside)
        else:
            _store_state(out, top, total, pooled, D, inside)


@triton.jit(do_not_specialize=["T", "B"])
def pool_rows(
    rows, scores, state, starts, positions, write_token, entries, states, T, B, D,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, SPAN: tl.constexpr, BD: tl.constexpr,
    UNROLL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Entries of SPAN tokens (the first programs) or the state after a token (the others).

    Of SPAN <= RATIO tokens one closes a window, unless they are of several sequences.
    """
    number = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    spans = (T + (SPAN - 1)) // SPAN
    if number < spans:
        first = number * SPAN
        token = first + tl.arange(0, SPAN)
        position = tl.load(positions + token, mask=token < T, other=-1)
        closes = (position >= 0) & (position % RATIO == RATIO - 1)
        at = entries + token[:, None] * D + d[None, :]
        others = ((token < T) & (closes == 0))[:, None] & (d < D)[None, :]
        tl.store(at, tl.zeros((SPAN, BD), tl.float32), mask=others)
        end = first + SPAN
        closing = tl.min(tl.where(closes, token, end), 0)
        while closing < end:
            _pool_to(
                rows, scores, state, starts, positions, closing, entries + closing * D + d, T, B,
                D, d, RATIO, OVERLAP, True, UNROLL, CHUNK,
            )  # fmt: skip
            closing = tl.min(tl.where(closes & (token > closing), token, end), 0)
    else:
        write = number - spans
        out = states + write * ((9 if OVERLAP else 3) * D) + d
        _pool_to(
            rows, scores, state, starts, positions, tl.load(write_token + write), out, T, B, D, d,
            RATIO, OVERLAP, False, UNROLL, CHUNK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "sequences", "width", "pages", "shift", "X"])
def write_entries(
    entries, pool, table, sequence_of, positions, T, sequences, width, pages, shift, X,
    RATIO: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Copy rows of X elements to the entries that their tokens fill."""
    token = tl.program_id(0).to(tl.int64)
    row, fills = place_of(
        table, sequence_of, positions, token, T, sequences, width, pages, shift, RATIO
    )
    x = tl.program_id(1) * BX + tl.arange(0, BX)
    mask = (x < X) & fills
    value = tl.load(entries + token * X + x, mask=mask, other=0)
    tl.store(pool + row * X + x, value.to(pool.dtype.element_ty), mask=mask)


@triton.jit
def _rounded(x, ROUND: tl.constexpr):
    """fp32 x after a way through the compute type."""
    if ROUND == BF16_:
        return x.to(tl.bfloat16).to(tl.float32)
    elif ROUND == FP16_:
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def _store_entry(
    entries, weight, cos, sin, pool, pool_tail, token, row, fills, eps,
    F: tl.constexpr, ROUND: tl.constexpr, ROTATED: tl.constexpr, LOG: tl.constexpr,
    CODED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TAIL: tl.constexpr,
    FORM: tl.constexpr, ROW: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr,
    ITEM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Norm, rotary, Hadamard rotation, encoding and insertion of the entry of one token [1]."""
    d = tl.arange(0, DP)
    at = token[:, None] * D + d[None, :]
    x = tl.load(entries + at, mask=(d < D)[None, :], other=0.0).to(tl.float32)
    x = _rounded(x, ROUND)
    scale = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    x = _rounded(x * inverse[:, None] * scale[None, :], ROUND)
    even, odd = tl.split(tl.reshape(x, (1, DP // 2, 2)))
    angle = tl.arange(0, DP // 2) - (D // 2 - F)
    turns = ((angle >= 0) & (angle < F))[None, :]
    at = token[:, None] * F + angle[None, :]
    c = tl.load(cos + at, mask=turns, other=1.0)
    s = tl.load(sin + at, mask=turns, other=0.0)
    x = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (1, DP))
    x = _rounded(x, ROUND)
    if ROTATED:
        x = _rounded(rotate(x, 1, DP, LOG), ROUND)
    if CODED:
        store_rows(
            pool, pool_tail, row, fills, x, 1, D, DP, TAIL, FORM, ROW, GROUP, E8M0, ITEM, PAD
        )
    else:
        at = row[:, None] * D + d[None, :]
        mask = fills[:, None] & (d < D)[None, :]
        tl.store(pool + at, x.to(pool.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "sequences", "width", "pages", "shift", "eps"])
def store_entries(
    entries, weight, cos, sin, pool, pool_tail, table, sequence_of, positions,
    T, sequences, width, pages, shift, eps,
    F: tl.constexpr, RATIO: tl.constexpr, SPAN: tl.constexpr, ROUND: tl.constexpr,
    ROTATED: tl.constexpr, LOG: tl.constexpr, CODED: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TAIL: tl.constexpr, FORM: tl.constexpr, ROW: tl.constexpr,
    GROUP: tl.constexpr, E8M0: tl.constexpr, ITEM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Store the entries of SPAN tokens, of which few fill one: see `_store_entry`."""
    first = tl.program_id(0).to(tl.int64) * SPAN
    token = first + tl.arange(0, SPAN)
    row, fills = place_of(
        table, sequence_of, positions, token, T, sequences, width, pages, shift, RATIO
    )
    end = first + SPAN
    filling = tl.min(tl.where(fills, token, end), 0)
    while filling < end:
        place = tl.sum(tl.where(token == filling, row, 0), 0)
        _store_entry(
            entries, weight, cos, sin, pool, pool_tail, filling + tl.zeros((1,), tl.int64),
            place + tl.zeros((1,), tl.int64), tl.full((1,), 1, tl.int1), eps, F, ROUND, ROTATED,
            LOG, CODED, D, DP, TAIL, FORM, ROW, GROUP, E8M0, ITEM, PAD,
        )  # fmt: skip
        filling = tl.min(tl.where(fills & (token > filling), token, end), 0)
