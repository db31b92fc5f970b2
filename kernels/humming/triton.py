"""Kernels around humming's products of experts.

Legend: T tokens, k experts of a token, P = T k pairs (pair t k + j is expert j of token t), E
experts of this rank, I intermediate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.activation.triton import silu_of


@triton.jit(do_not_specialize=["P", "first_expert", "experts", "BM"])
def align_pairs(
    ids, order, tiles, total, P, first_expert, experts, BM, EXPERTS: tl.constexpr,
    BP: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A program lists the pairs of GROUP experts in whole tiles of BM, behind experts before.

    order int32: the pairs of an expert, ascending, then P for the rest of its last tile. tiles
    int32: the expert of each tile. total int32 [1]: BM times the tiles of all experts. EXPERTS is
    a power of two, at least experts. Ids out of range take no part.
    """
    lane = tl.arange(0, BP)
    known = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for p in range(0, P, BP):
        inside = p + lane < P
        local = tl.load(ids + p + lane, mask=inside, other=-1) - first_expert
        held = inside & (local >= 0) & (local < experts)
        counts += tl.histogram(tl.where(held, local, 0).to(tl.int32), EXPERTS, mask=held)
    blocks = (counts + BM - 1) // BM
    first = tl.program_id(0) * GROUP
    if first == 0:
        tl.store(total, BM * tl.sum(blocks, 0))
    for e in range(first, tl.minimum(first + GROUP, experts)):
        tile = tl.sum(tl.where(known < e, blocks, 0), 0)
        end = tile + tl.sum(tl.where(known == e, blocks, 0), 0)
        _list_pairs(ids, order, tiles, P, first_expert, e, tile, end, BM, BP, BT)


@triton.jit
def _list_pairs(
    ids, order, tiles, P, first_expert, e, tile, end, BM, BP: tl.constexpr, BT: tl.constexpr
):
    """The pairs of expert e, and its number, to the tiles from `tile` to `end`."""
    lane = tl.arange(0, BP)
    place = tile * BM
    if end > tile:
        for p in range(0, P, BP):
            inside = p + lane < P
            local = tl.load(ids + p + lane, mask=inside, other=-1) - first_expert
            found = inside & (local == e)
            ranks = tl.cumsum(found.to(tl.int32), 0)
            tl.store(order + place + ranks - 1, p + lane, mask=found)
            place += tl.sum(found.to(tl.int32), 0)
    lanes = tl.arange(0, BT)
    for row in range(place, end * BM, BT):
        tl.store(order + row + lanes, tl.zeros((BT,), tl.int32) + P, mask=row + lanes < end * BM)
    for t in range(tile, end, BT):
        tl.store(tiles + t + lanes, tl.zeros((BT,), tl.int32) + e, mask=t + lanes < end)


@triton.jit(do_not_specialize=["first_expert", "experts", "limit"])
def swiglu(
    both, hidden, ids, first_expert, experts, limit, inner, LIMIT: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """hidden bf16 [P, inner]: silu(gate) * up of [P, 2 inner], for pairs of this rank's experts.

    With LIMIT the gate is cut to at most `limit` and up to -limit..limit.
    """
    pair = tl.program_id(0).to(tl.int64)
    local = tl.load(ids + pair) - first_expert
    held = (local >= 0) & (local < experts)
    columns = tl.program_id(1) * BI + tl.arange(0, BI)
    mask = (columns < inner) & held
    gate = tl.load(both + pair * 2 * inner + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + pair * 2 * inner + inner + columns, mask=mask, other=0.0).to(tl.float32)
    if LIMIT:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    product = silu_of(gate) * up
    tl.store(hidden + pair * inner + columns, product.to(hidden.dtype.element_ty), mask=mask)
