"""Triton kernels of the QSA indexer: scores of blocks, means of raw keys.

Legend: T tokens, H index heads (HP: the next power of two), D index head dim, M tokens and BK block
keys of a program, BT tokens of a product, R raw keys of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.split_keys import find_rows
from kernels.top_k.triton import keys_of


@triton.jit(
    do_not_specialize=[
        "tokens", "first_token", "per_tile", "kept", "sequences", "width", "pages",
        "shift", "scale",
    ]
)  # fmt: skip
def score_blocks(
    q, pool, scores, maxima, table, sequence_of, position_of, tokens, first_token, per_tile, kept,
    columns, W, sequences, width, pages, shift, scale,
    D: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, RATIO: tl.constexpr, EXACT: tl.constexpr, BEST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """scores[t, b] = scale * sum_h relu(q[first_token + t, h] . K_b), for `per_tile` <= M tokens
    and BK blocks.

    The keys are read once for consecutive tokens of one sequence, and multiplied with the queries
    of BT tokens at a time: [BK, D] x [D, BT * HP]. Written for the complete blocks of tokens that
    have more than `kept`; what else a program has is not read. EXACT multiplies in fp32, else in
    bf16. With BEST the keys of the best of every BEST blocks are stored too, for `kernels.top_k`,
    in rows of W.
    """
    tile = tl.program_id(1)
    number = tile * BK + tl.arange(0, BK)
    start = first_token + tl.program_id(0) * per_tile
    stop = tl.minimum(start + per_tile, tokens)
    token = start + tl.arange(0, M)
    last = tl.max(tl.load(position_of + token, mask=token < stop, other=-1), 0)
    longest = tl.minimum((last + 1) // RATIO, columns).to(tl.int32)
    if (longest <= kept) | (longest <= tile * BK):
        start = stop
    of = tl.load(sequence_of + token, mask=token < stop, other=-1)
    d = tl.arange(0, D)
    slot, head = tl.arange(0, BT * HP) // HP, tl.arange(0, BT * HP) % HP
    while start < stop:
        sequence = tl.load(sequence_of + start)
        end = tl.min(tl.where((token > start) & (of != sequence), token, stop), 0)
        key_row, shown = find_rows(
            table, sequence, number, number < longest, sequences, width, pages, shift
        )
        k = tl.load(pool + key_row[:, None] * D + d[None, :], mask=shown[:, None], other=0.0)
        for now in tl.range(start, end, BT, num_stages=STAGES):
            at = (now + slot).to(tl.int64) * H + head
            there = (now + slot < end) & (head < H)
            q_now = tl.load(q + at[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
            step = now + tl.arange(0, BT)
            position = tl.load(position_of + step, mask=step < end, other=-1)
            complete = tl.minimum((position + 1) // RATIO, columns).to(tl.int32)
            complete = tl.where((position >= 0) & (complete > kept), complete, 0)
            if EXACT:
                products = tl.dot(
                    k.to(tl.float32), tl.trans(q_now.to(tl.float32)), input_precision="ieee"
                )
            else:
                products = tl.dot(k.to(tl.bfloat16), tl.trans(q_now.to(tl.bfloat16)))
            positive = tl.reshape(tl.maximum(products, 0.0), (BK, BT, HP))
            total = tl.sum(positive, 2) * scale
            complete_here = number[:, None] < complete[None, :]
            row = (step - first_token).to(tl.int64)[None, :]
            tl.store(scores + row * columns + number[:, None], total, mask=complete_here)
            if BEST:
                shown_only = tl.where(complete_here, total, float("-inf"))
                best = tl.max(tl.reshape(shown_only, (BK // BEST, BEST, BT)), 1)
                group = (tile * (BK // BEST) + tl.arange(0, BK // BEST))[:, None]
                mask_best = (complete > 0)[None, :] & (group < W)
                tl.store(maxima + row * W + group, keys_of(best, mask_best), mask=mask_best)
        start = end


@triton.jit
def mean_rows(keys, out, X, R: tl.constexpr, D: tl.constexpr, BX: tl.constexpr):
    """out[t, d] = mean over r of keys[t, r, d], summed in fp32 from r = 0; X elements in all."""
    x = tl.program_id(0).to(tl.int64) * BX + tl.arange(0, BX)
    mask = x < X
    at = x // D * (R * D) + x % D
    total = tl.load(keys + at, mask=mask, other=0.0).to(tl.float32)
    for r in tl.static_range(1, R):
        total += tl.load(keys + at + r * D, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + x, (total / R).to(out.dtype.element_ty), mask=mask)
