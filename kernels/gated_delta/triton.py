"""Triton kernels of the delta rule in chunks of 64 tokens.

Legend: T tokens, B sequences, W writes, H value heads, G key heads, K key dim, V value dim, C
tokens of a chunk, BV values that a program of the pass keeps. Chunk i of sequence b has slot
starts[b] // C + b + i: slots of sequences do not overlap, whatever their lengths are, and a tile
is a slot with a head. The README has the algebra.
"""

from __future__ import annotations

import triton
import triton.language as tl

C: tl.constexpr = tl.constexpr(64)
BLOCK: tl.constexpr = tl.constexpr(16)  # rows that are solved one after the other
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
L2_EPS: tl.constexpr = tl.constexpr(1e-6)
# Log decays below are taken as this: what is left of a state, 1e-13 of it, does not count.
FLOOR: tl.constexpr = tl.constexpr(-30.0)
FACTORS: tl.constexpr = tl.constexpr(5)
# The same for decays of channels: those of half a block of rows together stay within fp32.
CHANNEL_FLOOR: tl.constexpr = tl.constexpr(-10.0)


@triton.jit
def bounds(starts, b, tokens):
    """The first token of sequence b and the one behind its last, int32, inside the T tokens."""
    begin = tl.minimum(tl.maximum(tl.load(starts + b), 0), tokens).to(tl.int32)
    end = tl.minimum(tl.maximum(tl.load(starts + b + 1), begin), tokens).to(tl.int32)
    return begin, end


@triton.jit
def find_chunk(starts, slot, sequences, tokens):
    """The first token of the chunk in `slot` and its number of tokens, 0 where there is none."""
    low = 0
    high = sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        start = tl.minimum(tl.maximum(tl.load(starts + middle), 0), tokens).to(tl.int32)
        behind = start // C + middle > slot
        low = tl.where(behind, low, middle)
        high = tl.where(behind, middle - 1, high)
    begin, end = bounds(starts, low, tokens)
    first = begin + (slot - begin // C - low) * C
    return first, tl.where(first < begin, 0, tl.minimum(end - first, C))


@triton.jit
def invert(a, scratch):
    """(1 + a)^-1 of a strictly lower fp32 [C, C]; `scratch` holds C x BLOCK fp32 of the program.

    Diagonal blocks row by row in fp32, through memory that stays in the first cache; then pairs
    of blocks of 16 and of 32 rows by products in TF32.
    """
    n = tl.arange(0, C)
    r = tl.arange(0, BLOCK)
    block = n // BLOCK
    same = block[:, None] == block[None, :]
    tl.store(scratch + n[:, None] * BLOCK + (n % BLOCK)[None, :], a, mask=same)
    tl.debug_barrier()
    x = tl.where(r[:, None] == (n % BLOCK)[None, :], 1.0, 0.0)
    for row in tl.static_range(1, BLOCK):
        at = (block * BLOCK + row)[None, :] * BLOCK + r[:, None]
        before = tl.load(scratch + at, mask=(r < row)[:, None], other=0.0)
        found = tl.sum(before * x, 0)
        x = tl.where(r[:, None] == row, x - found[None, :], x)
    tl.debug_barrier()
    blocks = tl.broadcast_to(x[None, :, :], (C // BLOCK, BLOCK, C))
    x = tl.where(same, tl.reshape(blocks, (C, C)), 0.0)
    for level in tl.static_range(2):
        pair = n // (BLOCK << level)
        joined = (pair[:, None] % 2 == 1) & (pair[:, None] == pair[None, :] + 1)
        part = tl.dot(x, tl.where(joined, a, 0.0), input_precision="tf32")
        x -= tl.dot(part, x, input_precision="tf32")
    return x


@triton.jit
def unit_factor(x):
    """fp32 [C]: what makes the rows of x unit length."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + L2_EPS)


@triton.jit(do_not_specialize=["tokens", "sequences", "heads", "group"])
def prepare(
    q, k, decay, beta, starts, solved, weights, factors, tokens, sequences, heads, group,
    q_stride, k_stride, scale,
    K: tl.constexpr,
):  # fmt: skip
    """What the pass needs of one chunk and value head: two [C, C] matrices, [FACTORS, C] rest."""
    slot = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    first, count = find_chunk(starts, slot, sequences, tokens)
    if count <= 0:
        return
    n = tl.arange(0, C)
    shown = n < count
    row = first.to(tl.int64) + n
    d = tl.arange(0, K)
    column = (head // group) * K + d
    at = row[:, None] * k_stride + column[None, :]
    k_tile = tl.load(k + at, mask=shown[:, None], other=0.0)
    at = row[:, None] * q_stride + column[None, :]
    q_tile = tl.load(q + at, mask=shown[:, None], other=0.0)
    g = tl.load(decay + row * heads + head, mask=shown, other=0.0)
    b = tl.load(beta + row * heads + head, mask=shown, other=0.0)
    g = tl.cumsum(tl.maximum(g, FLOOR) * LOG2_E, 0)
    k_unit = unit_factor(k_tile)
    q_unit = unit_factor(q_tile) * scale
    k_tile = k_tile.to(tl.bfloat16)
    lower = n[:, None] >= n[None, :]
    fade = tl.exp2(tl.where(lower, g[:, None] - g[None, :], 0.0)) * k_unit[None, :]
    fade = tl.where(lower, fade, 0.0)
    tile = tl.program_id(0).to(tl.int64)
    matrix = tile * (C * C) + n[:, None] * C + n[None, :]
    a = tl.dot(k_tile, tl.trans(k_tile)) * fade * (b * k_unit)[:, None]
    a = tl.where(n[:, None] == n[None, :], 0.0, a)
    scratch = (weights + tile * (C * C)).to(tl.pointer_type(tl.float32))
    x = invert(a, scratch) * b[None, :]
    tl.store(solved + matrix, x.to(tl.bfloat16))
    p = tl.dot(q_tile.to(tl.bfloat16), tl.trans(k_tile)) * fade * q_unit[:, None]
    tl.store(weights + matrix, p.to(tl.bfloat16))
    whole = tl.sum(tl.where(n == C - 1, g, 0.0), 0)
    factors += tile * (FACTORS * C) + n
    tl.store(factors, tl.exp2(g) * k_unit)
    tl.store(factors + C, tl.exp2(g) * q_unit)
    tl.store(factors + 2 * C, tl.exp2(whole - g) * k_unit)
    tl.store(factors + 3 * C, k_unit)
    tl.store(factors + 4 * C, g)


@triton.jit
def _next_write(write_token, writes, low, high):
    """The first token of a write from `low` on, int32; `high` where there is none before it.

    One by one: what threads exchange would look different in each of them to the compiler.
    """
    found = high
    for w in range(0, writes):
        token = tl.load(write_token + w)
        found = tl.where((token >= low) & (token < found), token.to(tl.int32), found)
    return found


@triton.jit
def _store_start(
    s, states, write_token, write_slot, first, end, writes, slots, size, POOL: tl.constexpr
):
    """A state into the places of all writes from token `first` until `end`."""
    for w in range(0, writes):
        token = tl.load(write_token + w)
        if (token >= first) & (token < end):
            slot = tl.load(write_slot + w) if POOL else w
            if (slot >= 0) & (slot < slots):
                tl.store(states + tl.cast(slot, tl.int64) * size, s)


@triton.jit
def _chunk(
    s, i, count, keys, queries, updates, v, solved, weights, factors, out,
    KEY_CHUNK: tl.constexpr, KEY_ROW: tl.constexpr, QUERY_CHUNK: tl.constexpr,
    QUERY_ROW: tl.constexpr, V_ROW: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The state [K, BV] after chunk i of `count` tokens; stores their outputs.

    Left operands of products come from memory and each warp reads rows of its own; results that
    become right operands are narrow. Factors of rows are few in a thread.
    """
    n = tl.arange(0, C).to(tl.int64)  # wide: constant parts of addresses then cost no registers
    d = tl.arange(0, K).to(tl.int64)
    e = tl.arange(0, BV).to(tl.int64)
    i = tl.cast(i, tl.int64)
    shown = (tl.arange(0, C) < count)[:, None]
    keys += i * KEY_CHUNK
    updates += i * KEY_CHUNK
    queries += i * QUERY_CHUNK
    v += i * C * V_ROW
    out += i * C * H * V
    solved += i * H * (C * C)
    weights += i * H * (C * C)
    factors += i * H * (K if CHANNELS else FACTORS * C)
    # Factors are read ahead of the products, which hide how long that takes.
    if CHANNELS:
        keep = tl.load(factors + d)[:, None]
        k_tile = tl.load(keys + n[:, None] * KEY_ROW + d[None, :])
        q_tile = tl.load(queries + n[:, None] * QUERY_ROW + d[None, :])
        update = tl.load(updates + n[None, :] * KEY_ROW + d[:, None])
    else:
        key_factor = tl.load(factors + n)[:, None]
        query_factor = tl.load(factors + C + n)[:, None]
        update_factor = tl.load(factors + 2 * C + n)[:, None]
        keep = tl.exp2(tl.load(factors + 4 * C + C - 1))
        k_tile = tl.load(keys + n[:, None] * KEY_ROW + d[None, :], mask=shown, other=0.0)
        q_tile = tl.load(queries + n[:, None] * QUERY_ROW + d[None, :], mask=shown, other=0.0)
        # Keys for the second time: transposed they want another order in shared memory.
        shown_key = (tl.arange(0, C) < count)[None, :]
        update = tl.load(updates + n[None, :] * KEY_ROW + d[:, None], mask=shown_key, other=0.0)
    held = s.to(tl.bfloat16)
    x = tl.dot(k_tile.to(tl.bfloat16), held)
    o = tl.dot(q_tile.to(tl.bfloat16), held)
    if not CHANNELS:
        x *= key_factor
    v_tile = tl.load(v + n[:, None] * V_ROW + e[None, :], mask=shown, other=0.0)
    x = v_tile.to(tl.float32) - x
    at_m = n[:, None] * C + n[None, :]
    u = tl.dot(tl.load(solved + at_m), x.to(tl.bfloat16))
    if not CHANNELS:
        o *= query_factor
    o = tl.dot(tl.load(weights + at_m), u.to(tl.bfloat16), o)
    at_o = n[:, None] * (H * V) + e[None, :]
    tl.store(out + at_o, o.to(out.dtype.element_ty), mask=shown)
    if not CHANNELS:
        u *= update_factor
    return tl.dot(update.to(tl.bfloat16), u.to(tl.bfloat16), s * keep)


@triton.jit(
    do_not_specialize=[
        "tokens", "sequences", "writes", "read_slots", "write_slots"]
)  # fmt: skip
def delta_pass(
    keys, queries, updates, v, solved, weights, factors, state, out, states, starts, write_token,
    read_slot, write_slot, tokens, sequences, writes, read_slots, write_slots,
    H: tl.constexpr, GROUP: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr,
    V_ROW: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CHANNELS: tl.constexpr,
    POOL: tl.constexpr,
):  # fmt: skip
    """One sequence, value head and slice of BV values: its chunks one after the other.

    CHANNELS: `keys`, `queries` and `updates` are tiles [C, K] with the decays in them, and
    `factors` the chunk's decay [K]; else they are k, q and k, and `factors` those of `prepare`.
    For a write the state before its chunk is stored, of which `finish` makes that after its token;
    after the last token of the sequence it is stored as it is.
    """
    part = tl.program_id(0) % (V // BV)
    head = tl.program_id(0) // (V // BV) % H
    b = tl.program_id(0) // (V // BV) // H
    begin, end = bounds(starts, b, tokens)
    row = begin.to(tl.int64)
    tile = (row // C + b) * H + head
    if CHANNELS:
        keys += tile * (C * K)
        queries += tile * (C * K)
        updates += tile * (C * K)
        factors += tile * K
    else:
        keys += row * K_ROW + (head // GROUP) * K
        updates += row * K_ROW + (head // GROUP) * K
        queries += row * Q_ROW + (head // GROUP) * K
        factors += tile * (FACTORS * C)
    key_row: tl.constexpr = K if CHANNELS else K_ROW
    query_row: tl.constexpr = K if CHANNELS else Q_ROW
    key_chunk: tl.constexpr = C * (H * K if CHANNELS else K_ROW)
    query_chunk: tl.constexpr = C * (H * K if CHANNELS else Q_ROW)
    v += row * V_ROW + head * V + part * BV
    solved += tile * (C * C)
    weights += tile * (C * C)
    out += (row * H + head) * V + part * BV
    within = _state_rows(head, part, K, V, BV)
    size: tl.constexpr = H * K * V
    place = tl.load(read_slot + b) if POOL else b
    known = (place >= 0) & (place < read_slots)
    state += tl.cast(tl.where(known, place, 0), tl.int64) * size
    s = tl.load(state + within, mask=known & (within >= 0), other=0.0)
    i = 0
    chunks = (end - begin + C - 1) // C
    while i < chunks:
        due = _next_write(write_token, writes, begin + i * C, end - 1)
        last = tl.where(due < end - 1, (due - begin) // C, chunks)
        if last == i:
            first = begin + i * C
            _store_start(
                s, states + within, write_token, write_slot, first, tl.minimum(first + C, end - 1),
                writes, write_slots, size, POOL,
            )  # fmt: skip
            due = _next_write(write_token, writes, first + C, end - 1)
            last = tl.where(due < end - 1, (due - begin) // C, chunks)
        for j in tl.range(i, last):
            s = _chunk(
                s, j, tl.minimum(end - begin - j * C, C), keys, queries, updates, v, solved,
                weights, factors, out, key_chunk, key_row, query_chunk, query_row, V_ROW, H, K, V,
                BV, CHANNELS,
            )  # fmt: skip
        i = last
    _store_start(
        s, states + within, write_token, write_slot, tl.maximum(begin, end - 1), end, writes,
        write_slots, size, POOL,
    )  # fmt: skip


@triton.jit
def _state_rows(head, part, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Where in a slot a slice of BV values is, int64 [K, BV]."""
    d = tl.arange(0, K).to(tl.int64)
    e = tl.arange(0, BV).to(tl.int64)
    return head.to(tl.int64) * (K * V) + part * BV + d[:, None] * V + e[None, :]


@triton.jit
def _update_rows(k, decay, p, k_row, decay_row, K: tl.constexpr):
    """bf16 k [C, K] of unit length, each row decayed up to row p, and the decay [K] of the rows up
    to there.
    """
    n = tl.arange(0, C)
    d = tl.arange(0, K)
    shown = (n <= p)[:, None]
    tile = tl.load(k + n[:, None] * k_row + d[None, :], mask=shown, other=0.0)
    at = n[:, None] * decay_row + d[None, :]
    g = tl.load(decay + at, mask=shown, other=0.0)
    keep = tl.exp2(tl.sum(tl.maximum(g, CHANNEL_FLOOR), 0) * LOG2_E)
    later = tl.load(decay + at + decay_row, mask=(n < p)[:, None], other=0.0)
    later = tl.cumsum(tl.maximum(later, CHANNEL_FLOOR), 0, reverse=True) * LOG2_E
    tile = tile.to(tl.float32) * unit_factor(tile)[:, None] * tl.exp2(later)
    return tile.to(tl.bfloat16), keep


@triton.jit(do_not_specialize=["tokens", "sequences", "writes", "write_slots", "heads", "group"])
def finish(
    keys, updates, k, v, decay, solved, factors, states, starts, write_token, write_slot, tokens,
    sequences, writes, write_slots, heads, group, k_stride, v_stride,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CHANNELS: tl.constexpr,
    POOL: tl.constexpr,
):  # fmt: skip
    """One write, value head and slice of BV values: the state before the chunk of its token, which
    `delta_pass` left, becomes that after the token. After a last token it is that already.
    """
    part = tl.program_id(0) % (V // BV)
    head = tl.program_id(0) // (V // BV) % heads
    w = tl.program_id(0) // (V // BV) // heads
    token = tl.load(write_token + w)
    slot = tl.load(write_slot + w) if POOL else w
    if (token < 0) | (token >= tokens) | (slot < 0) | (slot >= write_slots):
        return
    first, count, chunk = _chunk_of(starts, token.to(tl.int32), sequences, tokens)
    if count <= 0:
        return
    n = tl.arange(0, C)
    d = tl.arange(0, K)
    e = tl.arange(0, BV)
    shown = (n < count)[:, None]
    row = first.to(tl.int64)
    tile = chunk.to(tl.int64) * heads + head
    states += tl.cast(slot, tl.int64) * (heads.to(tl.int64) * (K * V))
    states += _state_rows(head, part, K, V, BV)
    s = tl.load(states)
    k += row * k_stride + (head // group) * K
    if CHANNELS:
        at_k = keys + tile * (C * K) + n[:, None] * K + d[None, :]
    else:
        at_k = k + n[:, None] * k_stride + d[None, :]
    k_tile = tl.load(at_k, mask=shown, other=0.0).to(tl.bfloat16)
    x = tl.dot(k_tile, s.to(tl.bfloat16))
    at_v = (row + n)[:, None] * v_stride + head * V + part * BV + e[None, :]
    v_tile = tl.load(v + at_v, mask=shown, other=0.0).to(tl.float32)
    t_tile = tl.load(solved + tile * (C * C) + n[:, None] * C + n[None, :])
    if CHANNELS:
        u = tl.dot(t_tile, (v_tile - x).to(tl.bfloat16))
        if count == C:
            k_tile = tl.load(updates + tile * (C * K) + n[:, None] * K + d[None, :])
            keep = tl.load(factors + tile * K + d)
        else:
            decay += (row * heads + head) * K
            k_tile, keep = _update_rows(k, decay, count - 1, k_stride, heads * K, K)
        s *= keep[:, None]
    else:
        factors += tile * (FACTORS * C)
        x = v_tile - x * tl.load(factors + n)[:, None]
        u = tl.dot(t_tile, x.to(tl.bfloat16))
        last = tl.load(factors + 4 * C + count - 1)
        g = tl.load(factors + 4 * C + n)
        u *= (tl.exp2(tl.minimum(last - g, 0.0)) * tl.load(factors + 3 * C + n))[:, None]
        s *= tl.exp2(last)
    tl.store(states, tl.dot(tl.trans(k_tile.to(tl.bfloat16)), u.to(tl.bfloat16), s))


@triton.jit
def _chunk_of(starts, token, sequences, tokens):
    """The first token of the chunk of `token`, the number of its tokens up to that one, 0 where
    no sequence has the token before its last one, and the slot.
    """
    low = 0
    high = sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        behind = tl.load(starts + middle) > token
        low = tl.where(behind, low, middle)
        high = tl.where(behind, middle - 1, high)
    begin, end = bounds(starts, low, tokens)
    i = (token - begin) // C
    first = begin + i * C
    count = tl.where((token >= begin) & (token < end - 1), token + 1 - first, 0)
    return first, count, begin // C + low + i
