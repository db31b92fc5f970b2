"""Triton kernel of recurrent steps of the delta rule: from projections to the normed output.

Legend: B sequences of N rows, H heads (values), G key heads, R = H / G, K key dim, V value dim
(W: the next power of two of both), C = 2 G K + H V channels, S slots. Four taps: a window has
three rows of C channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.activation.triton import sigmoid_of, silu_of, softplus_of

# One decay of a head; one of a key channel, with a lower bound and without.
HEAD_DECAY, BOUNDED_DECAY, CHANNEL_DECAY = (tl.constexpr(kind) for kind in range(3))
SIGMOID_GATE, SILU_GATE = (tl.constexpr(kind) for kind in range(2))
L2_EPS: tl.constexpr = tl.constexpr(1e-6)
ROWS: tl.constexpr = tl.constexpr(3)
TAPS: tl.constexpr = tl.constexpr(4)
NUMBERS = ("qkv_token", "a_token", "b_token", "z_token", "slots")


@triton.jit
def _row_weights(conv, channel, mask):
    """The four taps of channels, oldest first."""
    at = conv + channel * TAPS
    w0 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    w1 = tl.load(at + 1, mask=mask, other=0.0).to(tl.float32)
    w2 = tl.load(at + 2, mask=mask, other=0.0).to(tl.float32)
    w3 = tl.load(at + 3, mask=mask, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def _convolved(x0, x1, x2, x3, w0, w1, w2, w3):
    """silu of the weighted sum, rounded to the type of x as between two operations."""
    y = x0.to(tl.float32) * w0
    y = y + x1.to(tl.float32) * w1
    y = y + x2.to(tl.float32) * w2
    y = y + x3.to(tl.float32) * w3
    return silu_of(y).to(x3.dtype).to(tl.float32)


@triton.jit
def _rows_of(tile, W: tl.constexpr):
    """The first three of four rows."""
    even, odd = tl.split(tl.trans(tl.reshape(tile, (2, 2, W)), (2, 0, 1)))
    row0, row2 = tl.split(even)
    row1, _ = tl.split(odd)
    return row0, row1, row2


@triton.jit
def _products(state, k, q):
    """state^T k and state^T q, summed together."""
    return tl.split(tl.sum(tl.join(state * k[:, None], state * q[:, None]), 0))


@triton.jit(do_not_specialize=NUMBERS)
def delta_step(
    qkv, a, b, z, windows, states, conv, a_log, dt_bias, norm, out, read_slot, write_slot, lengths,
    arrived, qkv_token, a_token, b_token, z_token, slots, eps, bound,
    N: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    DECAY: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """A program has one value head of one sequence, and its state in registers.

    Per token: convolution of its channels, unit q and k, decay and beta, then with s = S^T k and
    t = S^T q of the decayed S: u = beta (v - s), o = t + (k q) u, S = S + k u^T, norm of o, gate.
    The windows of q and k are read by R programs and stored by one: by that of the first head, or,
    where the slot that is read is also stored, by the last that has read them. Each thread counts
    the readers of its channels in `arrived` [B, 2 G K], which is zero before and after. A thread
    has the values when it counts, so no order of memory is needed beyond that.
    """
    head, sequence = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0)
    group, keys = head // R, (heads // R) * K
    channels = 2 * keys + heads * V
    first = (sequence * N).to(tl.int64)
    slot = tl.load(read_slot + sequence)
    length = tl.minimum(tl.load(lengths + sequence), N).to(tl.int32)
    known = (slot >= 0) & (slot < slots)
    slot = tl.where(known, slot, 0)

    # Everything that the first token needs is asked for before any of it is used.
    at = tl.arange(0, W)
    k_in, v_in = at < K, at < V
    cell = at[:, None] * V + at[None, :]
    cell_in = k_in[:, None] & v_in[None, :]
    state = tl.load(
        states + (slot * heads + head) * (K * V) + cell, mask=cell_in & known, other=0.0
    )
    # Rows of q, k and v, and an empty one: no fewer values than threads.
    row = tl.arange(0, 4)[:, None]
    is_value = row == 2
    channel = tl.where(is_value, 2 * keys + head * V, row * keys + group * K) + at[None, :]
    inside = ((row < 2) & k_in[None, :]) | (is_value & v_in[None, :])
    window = windows + slot * (ROWS * channels) + channel
    x0 = tl.load(window, mask=inside & known, other=0.0)
    x1 = tl.load(window + channels, mask=inside & known, other=0.0)
    x2 = tl.load(window + 2 * channels, mask=inside & known, other=0.0)
    x3 = tl.load(qkv + first * qkv_token + channel, mask=inside, other=0.0)
    w0, w1, w2, w3 = _row_weights(conv, channel, inside)
    if DECAY == HEAD_DECAY:
        forget = tl.load(a + first * a_token + head)
        bias = tl.load(dt_bias + head).to(tl.float32)
    else:
        forget_at = row * 0 + (head * K + at)[None, :]
        forget_in = (row >= 0) & k_in[None, :]
        forget = tl.load(a + first * a_token + forget_at, mask=forget_in, other=0.0)
        bias = tl.load(dt_bias + forget_at, mask=forget_in, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    raw_beta = tl.load(b + first * b_token + head)
    gate = tl.load(z + first * z_token + head * V + at, mask=v_in, other=0.0)
    scale = tl.load(norm + at, mask=v_in, other=0.0).to(tl.float32)
    stored = inside
    if R > 1:
        in_place = slot < 0
        for n in tl.static_range(N):
            in_place = in_place | (known & (tl.load(write_slot + first + n) == slot))
        stored = inside & (is_value | ((head % R == 0) & (in_place == 0)))

    for n in range(tl.maximum(length, 0), N):
        nothing = tl.zeros((W,), out.dtype.element_ty)
        tl.store(out + ((first + n) * heads + head) * V + at, nothing, mask=v_in)
    if length <= 0:
        return
    for n in range(1 if N == 1 else length):
        # The next token's rows, so that they arrive while this one is computed.
        token = first + n
        more = n + 1 < length
        next_x = tl.load(qkv + (token + 1) * qkv_token + channel, mask=inside & more, other=0.0)
        if DECAY == HEAD_DECAY:
            next_forget = tl.load(a + (token + 1) * a_token + head, mask=more, other=0.0)
        else:
            place = a + (token + 1) * a_token + forget_at
            next_forget = tl.load(place, mask=forget_in & more, other=0.0)
        next_beta = tl.load(b + (token + 1) * b_token + head, mask=more, other=0.0)
        place = z + (token + 1) * z_token + head * V + at
        next_gate = tl.load(place, mask=v_in & more, other=0.0)
        target = tl.load(write_slot + token)

        mixed = _convolved(x0, x1, x2, x3, w0, w1, w2, w3)
        size = tl.rsqrt(tl.sum(mixed * mixed, 1) + L2_EPS)[:, None]
        mixed = mixed * tl.where(is_value, 1.0, tl.where(row == 0, size * K**-0.5, size))
        pace = forget.to(tl.float32) + bias
        if DECAY == BOUNDED_DECAY:
            decay = tl.exp(bound * sigmoid_of(pace * rate))
        else:
            decay = tl.exp(-rate * softplus_of(pace))
        beta = sigmoid_of(raw_beta.to(tl.float32))
        q, k, v = _rows_of(mixed, W)
        k_q = tl.sum(k * q, 0)
        if DECAY == HEAD_DECAY:
            s, t = _products(state, k, q)
            s, t = s * decay, t * decay
            state = state * decay
        else:
            faded_q, faded_k, _ = _rows_of(mixed * decay, W)
            s, t = _products(state, faded_k, faded_q)
            channel_decay, _, _ = _rows_of(decay, W)
            state = state * channel_decay[:, None]
        u = beta * (v - s)
        o = t + k_q * u
        state = state + k[:, None] * u[None, :]

        kept = (target >= 0) & (target < slots)
        if kept:  # before the norm, so that it is on its way meanwhile
            tl.store(states + (target * heads + head) * (K * V) + cell, state, mask=cell_in)

        tl.debug_barrier()  # all threads have read the window, which may be stored over
        if R > 1:
            counted = inside & (row < 2) & (in_place & (n == 0))
            count = arrived + sequence * (2 * keys) + channel
            seen = tl.atomic_add(count, 1, mask=counted, sem="relaxed")
        y = o * tl.rsqrt(tl.sum(o * o, 0) * (1.0 / V) + eps) * scale
        opening = gate.to(tl.float32)
        y = y * (silu_of(opening) if GATE == SILU_GATE else sigmoid_of(opening))
        place = out + (token * heads + head) * V + at
        tl.store(place, y.to(out.dtype.element_ty), mask=v_in)
        if R > 1:
            last = counted & (seen == R - 1)
            stored = stored | last
            tl.store(count, 0, mask=last)
        if kept:
            past = windows + target * (ROWS * channels) + channel
            tl.store(past, x1, mask=stored)
            tl.store(past + channels, x2, mask=stored)
            tl.store(past + 2 * channels, x3, mask=stored)
        x0, x1, x2, x3 = x1, x2, x3, next_x
        forget, raw_beta, gate = next_forget, next_beta, next_gate
