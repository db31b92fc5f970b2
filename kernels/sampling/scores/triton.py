"""Triton kernels for log-probabilities: one pass over the logits, then one program a row.

Legend: R rows, V vocabulary, B blocks of a row, G tokens of a group, M groups that a program
holds, W groups of a row in memory, TOP length of a list, rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.top_k.triton import LEAST, bounds, count_from, key_of, scatter, taken_from

NOTHING: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def block_scores(
    logits, tokens, block_best, block_sum, block_rank, maxima, vocab, row_stride, W,
    BLOCK: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Of each block: best, sum of exp(x - best), tokens above the given one; bests of its groups.

    Grid (B, R). A token id out of range is above all others. Bests are keys, -inf has one too.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = row * tl.num_programs(0) + block
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    start = logits + row * row_stride
    value = tl.load(start + token, mask=inside, other=NOTHING).to(tl.float32)
    bests = tl.max(tl.reshape(value, (BLOCK // G, G)), 1)
    group = block * (BLOCK // G) + tl.arange(0, BLOCK // G)
    tl.store(maxima + row * W + group, key_of(bests + 0.0), mask=group < W)
    best = tl.max(bests, 0)
    shift = tl.where(best == NOTHING, 0.0, best)
    tl.store(block_best + at, best)
    tl.store(block_sum + at, tl.sum(tl.exp(value - shift), 0))
    given = tl.load(tokens + row)
    known = (given >= 0) & (given < vocab)
    own = tl.load(start + given, mask=known, other=float("inf")).to(tl.float32)
    tl.store(block_rank + at, tl.sum((inside & (value > own)).to(tl.int32), 0))


@triton.jit
def _best_keys(key, K):
    """Which keys are the K largest, the lower place among equals, and their places in order."""
    low = tl.min(tl.where(key > LEAST, key, 0x7FFFFFFF), 0)
    high = tl.max(key, 0) + 1
    low, high, at_low, at_high = bounds(key, low, high, count_from(key, low), K)
    return taken_from(key, low, high, at_low, at_high, K)


@triton.jit
def _list(
    start, maxima, chosen, ids, logprobs, most, norm, vocab, W, top,
    G: tl.constexpr, M: tl.constexpr, TOP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The `top` best tokens, ordered: of the groups with the best bests, which hold them all."""
    group = tl.arange(0, M)
    key = tl.load(maxima + group, mask=group * G < vocab, other=LEAST)
    taken, place = _best_keys(key, tl.minimum(top, (vocab + (G - 1)) // G))
    place_of = tl.arange(0, TOP)
    tl.store(chosen + place_of, tl.full((TOP,), -1, tl.int32), mask=place_of < top)
    tl.debug_barrier()
    scatter(chosen + place, group, taken, PTX)
    tl.debug_barrier()
    group = tl.load(chosen + place_of, mask=place_of < top, other=-1)
    token = group[:, None] * G + tl.arange(0, G)[None, :]
    inside = (group >= 0)[:, None] & (token < vocab)
    value = tl.load(start + token, mask=inside, other=NOTHING).to(tl.float32)
    key = tl.reshape(tl.where(inside, key_of(value + 0.0), LEAST), (TOP * G,))
    taken, place = _best_keys(key, top)
    tl.debug_barrier()
    scatter(chosen + place, tl.reshape(token, (TOP * G,)), taken, PTX)
    tl.debug_barrier()
    token = tl.load(chosen + place_of, mask=place_of < top, other=0)
    value = tl.load(start + token, mask=place_of < top, other=NOTHING).to(tl.float32)
    key = key_of(value + 0.0)
    left, right = key[:, None], key[None, :]
    earlier = (right > left) | ((right == left) & (place_of[None, :] < place_of[:, None]))
    rank = tl.sum((earlier & (place_of < top)[None, :]).to(tl.int32), 1)
    tl.store(ids + rank, token.to(tl.int64), mask=place_of < top)
    tl.store(logprobs + rank, value - most - norm, mask=place_of < top)


@triton.jit(do_not_specialize=["blocks", "top"])
def row_scores(
    logits, tokens, block_best, block_sum, block_rank, maxima, chosen, logprob, rank, ids,
    logprobs, vocab, row_stride, W, blocks, top,
    BLOCKS: tl.constexpr, G: tl.constexpr, M: tl.constexpr, TOP: tl.constexpr,
    PTX: tl.constexpr,
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
    start = logits + row * row_stride
    own = tl.load(start + given, mask=known, other=NOTHING).to(tl.float32)
    tl.store(logprob + row, own - most - norm)
    tl.store(rank + row, tl.sum(above, 0).to(tl.int64) + 1)
    if top > 0:
        _list(
            start, maxima + row * W, chosen + row * TOP, ids + row * top, logprobs + row * top,
            most, norm, vocab, W, top, G, M, TOP, PTX,
        )  # fmt: skip
