"""Triton kernels of the QSA indexer: scores of blocks, means of raw keys.

Legend: T tokens, H index heads, D index head dim, M tokens and BK block keys of a program, R raw
keys of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.paged_attention.triton import find_runs
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
    D: tl.constexpr, H: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, RATIO: tl.constexpr,
    EXACT: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """scores[t, b] = scale * sum_h relu(q[first_token + t, h] . K_b), for `per_tile` tokens and BK
    blocks.

    Written for the complete blocks of tokens that have more than `kept`; what else a program has
    is not read. EXACT multiplies in fp32, else in bf16. With BEST the keys of the best of every
    BEST blocks are stored too, for `kernels.top_k`, in rows of W.
    """
    row = tl.arange(0, M)
    number = tl.program_id(1) * BK + tl.arange(0, BK)
    token = first_token + tl.program_id(0) * per_tile + row
    mask = (row < per_tile) & (token < tokens)
    sequence_row, run = find_runs(sequence_of, token, mask, mask, sequences)
    position = tl.load(position_of + token, mask=mask, other=-1)
    complete = tl.minimum((position + 1) // RATIO, columns).to(tl.int32)
    complete = tl.where(mask & (position >= 0) & (complete > kept), complete, 0)
    d = tl.arange(0, D)
    at = (token - first_token).to(tl.int64)[:, None] * columns + number[None, :]
    for r in range(1, 1 + tl.max(run, 0)):
        mine = tl.where(run == r, complete, 0)
        count = tl.max(mine, 0)
        if count > tl.program_id(1) * BK:
            sequence = tl.max(tl.where(run == r, sequence_row, -1), 0)
            key_row, shown = find_rows(
                table, sequence, number, number < count, sequences, width, pages, shift
            )
            k = tl.load(pool + key_row[:, None] * D + d[None, :], mask=shown[:, None], other=0.0)
            acc = tl.zeros((M, BK), tl.float32)
            for h in tl.static_range(H):
                q_at = (token.to(tl.int64) * H + h)[:, None] * D + d[None, :]
                q_h = tl.load(q + q_at, mask=(mine > 0)[:, None], other=0.0)
                if EXACT:
                    products = tl.dot(
                        q_h.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee"
                    )
                else:
                    products = tl.dot(q_h.to(tl.bfloat16), tl.trans(k.to(tl.bfloat16)))
                acc += tl.maximum(products, 0.0)
            complete_here = number[None, :] < mine[:, None]
            tl.store(scores + at, acc * scale, mask=complete_here)
            if BEST:
                shown_only = tl.where(complete_here, acc * scale, float("-inf"))
                best = tl.max(tl.reshape(shown_only, (M, BK // BEST, BEST)), 2)
                group = tl.program_id(1) * (BK // BEST) + tl.arange(0, BK // BEST)
                at_best = (token - first_token).to(tl.int64)[:, None] * W + group[None, :]
                mask_best = (mine > 0)[:, None] & (group < W)[None, :]
                tl.store(maxima + at_best, keys_of(best, mask_best), mask=mask_best)


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
