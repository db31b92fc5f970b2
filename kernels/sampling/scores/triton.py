"""Triton kernels for log-probabilities: one pass over the logits, then one program a row.

Legend: R rows, V vocabulary, B blocks of a row, TOP length of a block's list (a power of two).
"""

from __future__ import annotations

import triton
import triton.language as tl

NOTHING: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def _take(value, token, left, vocab):
    """The best of what is left, the lowest id among equals, and what is left then."""
    best = tl.max(tl.where(left, value, NOTHING), 0)
    first = tl.min(tl.where(left & (value == best), token, vocab), 0)
    return best, first, left & (token != first)


@triton.jit(do_not_specialize=["top"])
def block_scores(
    logits, tokens, block_best, block_sum, block_rank, top_values, top_ids, vocab, row_stride,
    top, BLOCK: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Of each block: best, sum of exp(x - best), tokens above the given one, the `top` best.

    Grid (B, R). A token id out of range is above all others.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = row * tl.num_programs(0) + block
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    start = logits + row * row_stride
    value = tl.load(start + token, mask=inside, other=NOTHING).to(tl.float32)
    best = tl.max(value, 0)
    shift = tl.where(best == NOTHING, 0.0, best)
    tl.store(block_best + at, best)
    tl.store(block_sum + at, tl.sum(tl.exp(value - shift), 0))
    given = tl.load(tokens + row)
    known = (given >= 0) & (given < vocab)
    own = tl.load(start + given, mask=known, other=float("inf")).to(tl.float32)
    tl.store(block_rank + at, tl.sum((inside & (value > own)).to(tl.int32), 0))
    left = inside
    for i in range(top):
        value_i, id_i, left = _take(value, token, left, vocab)
        tl.store(top_values + at * TOP + i, value_i)
        tl.store(top_ids + at * TOP + i, id_i)


@triton.jit(do_not_specialize=["blocks", "top"])
def row_scores(
    logits, tokens, block_best, block_sum, block_rank, top_values, top_ids, logprob, rank, ids,
    logprobs, vocab, row_stride, blocks, top, BLOCKS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Log-probability and rank of the given tokens; ids and log-probabilities of the best."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    there = block < blocks
    best = tl.load(block_best + row * blocks + block, mask=there, other=NOTHING)
    sums = tl.load(block_sum + row * blocks + block, mask=there, other=0.0)
    above = tl.load(block_rank + row * blocks + block, mask=there, other=0)
    most = tl.max(best, 0)
    norm = tl.log(tl.sum(tl.where(sums > 0.0, sums * tl.exp(best - most), 0.0), 0))
    given = tl.load(tokens + row)
    known = (given >= 0) & (given < vocab)
    own = tl.load(logits + row * row_stride + given, mask=known, other=NOTHING).to(tl.float32)
    tl.store(logprob + row, own - most - norm)
    tl.store(rank + row, tl.sum(above, 0).to(tl.int64) + 1)
    place = tl.arange(0, BLOCKS * TOP)
    left = (place < blocks * TOP) & (place % TOP < top)
    value = tl.load(top_values + row * blocks * TOP + place, mask=left, other=NOTHING)
    token = tl.load(top_ids + row * blocks * TOP + place, mask=left, other=vocab)
    for i in range(top):
        value_i, id_i, left = _take(value, token, left & (token < vocab), vocab)
        tl.store(ids + row * top + i, id_i.to(tl.int64))
        tl.store(logprobs + row * top + i, value_i - most - norm)
