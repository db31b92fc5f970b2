"""Device functions over up to F collected tokens, sorted: by logit, largest first, then by id."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.triton import BINS_, NOTHING, weigh
from kernels.top_k.triton import key_of, number_of

ID_BITS: tl.constexpr = tl.constexpr(18)  # a vocabulary has fewer than 2^18 tokens
ID_MASK: tl.constexpr = tl.constexpr(2**18 - 1)
BEHIND_ALL: tl.constexpr = tl.constexpr(2**62)


@triton.jit
def in_order(x, ids, amount, best, F: tl.constexpr):
    """Of the `amount` <= F listed tokens: id, logit, bin, q, and the running sum of q."""
    place = tl.arange(0, F)
    there = place < amount
    token = tl.load(ids + place, mask=there, other=0)
    value = tl.load(x + token, mask=there, other=NOTHING)
    word = ((0 - key_of(value).to(tl.int64)) << ID_BITS) | token.to(tl.int64)
    word = tl.sort(tl.where(there, word, BEHIND_ALL))
    token = (word & ID_MASK).to(tl.int32)
    value = number_of((0 - (word >> ID_BITS)).to(tl.int32))
    bin, q = weigh(value, best)
    q = tl.where(there, q, 0)
    return token, value, tl.where(there, bin, BINS_), q, tl.cumsum(q, 0)


@triton.jit
def cut_of(bin_of, q, sums, bin, target, ONES: tl.constexpr, F: tl.constexpr):
    """The place where the running sum of q (or number) within `bin` first exceeds `target`, and
    the sum of q within the bin up to there.
    """
    before = bin_of < bin
    at = tl.sum(before.to(tl.int32), 0)
    base = tl.sum(tl.where(before, q, 0), 0)
    if ONES:
        at += target.to(tl.int32)
    else:
        at += tl.sum(((bin_of == bin) & (sums - base <= target)).to(tl.int32), 0)
    return at, value_at(sums, at, F) - base


@triton.jit
def value_at(values, at, F: tl.constexpr):
    """values[at]; 0 beyond."""
    return tl.sum(tl.where(tl.arange(0, F) == at, values, 0), 0)
