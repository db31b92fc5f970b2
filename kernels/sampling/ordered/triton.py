"""Device functions over up to F collected tokens, sorted: by logit, largest first, then by id."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling.triton import BINS_, NOTHING, REACH, weigh
from kernels.top_k.triton import key_of, number_of

ID_BITS: tl.constexpr = tl.constexpr(18)  # a vocabulary has fewer than 2^18 tokens
ID_MASK: tl.constexpr = tl.constexpr(2**18 - 1)
BEHIND_ALL: tl.constexpr = tl.constexpr(2**62)


@triton.jit
def listed(counter, ids, token, chosen, capacity):
    """Append the ids of chosen tokens to a list; whether it still holds all that were to be in it.

    The first `capacity` to arrive are stored, all are counted.
    """
    chosen_32 = chosen.to(tl.int32)
    amount = tl.sum(chosen_32, 0)
    held = tl.full((), 1, tl.int32)
    if amount > 0:
        start = tl.atomic_add(counter, amount, sem="relaxed")
        if start < capacity:
            place = start + tl.cumsum(chosen_32, 0) - chosen_32
            tl.store(ids + place, token, mask=chosen & (place < capacity))
        held = (start + amount <= capacity).to(tl.int32)
    return held


@triton.jit
def in_order(x, ids, amount, best, F: tl.constexpr):
    """Of the `amount` <= F listed tokens: id, logit, bin and q, 0 behind the last."""
    place = tl.arange(0, F)
    there = place < amount
    token = tl.load(ids + place, mask=there, other=0, cache_modifier=".cg")
    value = tl.load(x + token, mask=there, other=NOTHING)
    word = ((0 - key_of(value).to(tl.int64)) << ID_BITS) | token.to(tl.int64)
    word = tl.sort(tl.where(there, word, BEHIND_ALL))
    token = (word & ID_MASK).to(tl.int32)
    value = number_of((0 - (word >> ID_BITS)).to(tl.int32))
    bin, q = weigh(value, best)
    return token, value, tl.where(there, bin, BINS_), tl.where(there, q, 0)


@triton.jit
def least_sum(top_p, total):
    """What the running sum must reach for a top-p set of `total` units, at least 1."""
    exact = top_p.to(tl.float64) * total.to(tl.float64)
    floor = exact.to(tl.int64)
    return tl.maximum(floor + (floor.to(tl.float64) < exact).to(tl.int64), 1)


@triton.jit
def draw_at(uniform, total, counted):
    """The running sum that the drawn token is the first to exceed, of units that are counted."""
    target = (uniform * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(target, tl.minimum(total, counted) - 1)


@triton.jit
def drawn_of(
    token, distances, weight, before, place, there, total, counted, k, p, distance, u, nearer,
    F: tl.constexpr,
):  # fmt: skip
    """The token drawn from sorted tokens that hold each end of a prefix and the drawn one.

    Of each its distance, units, the units of all tokens before it and their number. `total` units
    in all, of which `counted` have a place. k, top-p 1 and a distance of REACH are off where 0, 1
    and REACH. `nearer`: units that min-p keeps before the first that is listed.
    """
    after = before + weight
    kept = total
    if k > 0:
        kept = tl.max(tl.where(there & (place < k), after, 0), 0)
    if p < 1.0:
        least = tl.minimum(least_sum(p, kept), counted)
        kept = tl.max(tl.where(there & (before < least), after, 0), 0)
    if distance < REACH:
        near = tl.max(tl.where(there & (distances <= distance), after, 0), 0)
        kept = tl.minimum(kept, tl.maximum(near, nearer))
    target = draw_at(u, kept, counted)
    word = (tl.arange(0, F) << ID_BITS) | token
    return tl.max(tl.where(there & (before <= target), word, 0), 0) & ID_MASK
