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
    w0 = tl.load(at, mask=mask, other=0.0)
    w1 = tl.load(at + 1, mask=mask, other=0.0)
    w2 = tl.load(at + 2, mask=mask, other=0.0)
    w3 = tl.load(at + 3, mask=mask, other=0.0)
    return w0, w1, w2, w3


@triton.jit
def _convolved(x0, x1, x2, x3, w0, w1, w2, w3):
    """silu of the weighted sum, rounded to the type of x as between two operations."""
    y = x0.to(tl.float32) * w0.to(tl.float32)
    y = y + x1.to(tl.float32) * w1.to(tl.float32)
    y = y + x2.to(tl.float32) * w2.to(tl.float32)
    y = y + x3.to(tl.float32) * w3.to(tl.float32)
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


@triton.jit
def _known_slot(read_slot, sequence, slots):
    """The slot that a sequence reads, 0 where it is none, and whether it is one."""
    slot = tl.load(read_slot + sequence)
    known = (slot >= 0) & (slot < slots)
    return tl.where(known, slot, 0), known


@triton.jit
def _channels(
    group, head, keys, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Channels [4, W] of a head's q, k and v, and an empty row: no fewer values than threads.

    And which of them there are.
    """
    row, at = tl.arange(0, 4)[:, None], tl.arange(0, W)
    is_value = row == 2
    channel = tl.where(is_value, 2 * keys + head * V, row * keys + group * K) + at[None, :]
    return channel, ((row < 2) & (at < K)[None, :]) | (is_value & (at < V)[None, :])


@triton.jit
def _decay_place(head, K: tl.constexpr, W: tl.constexpr, DECAY: tl.constexpr):
    """Where in a token the decays of a head are and whether they are: one, or a row for each of the
    four of the channels.
    """
    if DECAY == HEAD_DECAY:
        place, inside = head, True
    else:
        row, at = tl.arange(0, 4)[:, None], tl.arange(0, W)
        place, inside = row * 0 + (head * K + at)[None, :], (row >= 0) & (at < K)[None, :]
    return place, inside


@triton.jit
def _owned(
    channel_in, write_slot, first, slot, known, head, N: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Whose windows this program stores at once, and whether the slot that is read is stored."""
    in_place = slot < 0
    if R > 1:
        for n in tl.static_range(N):
            in_place = in_place | (known & (tl.load(write_slot + first + n) == slot))
        is_value = tl.arange(0, 4)[:, None] == 2
        channel_in = channel_in & (is_value | ((head % R == 0) & (in_place == 0)))
    return channel_in, in_place


@triton.jit
def _unit_rows(mixed, K: tl.constexpr):
    """q and k of unit length, q by K^(-1/2) shorter; v as it is."""
    row = tl.arange(0, 4)[:, None]
    size = tl.rsqrt(tl.sum(mixed * mixed, 1) + L2_EPS)[:, None]
    return mixed * tl.where(row == 2, 1.0, tl.where(row == 0, size * K**-0.5, size))


@triton.jit
def _decay_of(forget, bias, rate, bound, DECAY: tl.constexpr):
    pace = forget.to(tl.float32) + bias
    if DECAY == BOUNDED_DECAY:
        decay = tl.exp(bound * sigmoid_of(pace * rate))
    else:
        decay = tl.exp(-rate * softplus_of(pace))
    return decay


@triton.jit
def _advanced(state, mixed, decay, beta, W: tl.constexpr, DECAY: tl.constexpr):
    """The state after a token of which `mixed` has q, k and v; and its output."""
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
    return state + k[:, None] * u[None, :], t + k_q * u


@triton.jit
def _gated_norm(o, gate, scale, eps, V: tl.constexpr, GATE: tl.constexpr):
    y = o * tl.rsqrt(tl.sum(o * o, 0) * (1.0 / V) + eps) * scale
    opening = gate.to(tl.float32)
    return y * (silu_of(opening) if GATE == SILU_GATE else sigmoid_of(opening))


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
    keys = (heads // R) * K
    channels = 2 * keys + heads * V
    first = (sequence * N).to(tl.int64)
    slot, known = _known_slot(read_slot, sequence, slots)
    length = tl.minimum(tl.load(lengths + sequence), N).to(tl.int32)

    # Everything that the first token needs is asked for before any of it is used: what does not
    # wait for the slot number first, and the state last, of which the convolution needs nothing.
    at = tl.arange(0, W)
    v_in = at < V
    channel, inside = _channels(head // R, head, keys, R, K, V, W)
    qkv += first * qkv_token + channel
    x3 = tl.load(qkv, mask=inside, other=0.0)
    w0, w1, w2, w3 = _row_weights(conv, channel, inside)
    place, decay_in = _decay_place(head, K, W, DECAY)
    a += first * a_token + place
    forget = tl.load(a, mask=decay_in, other=0.0)
    bias = tl.load(dt_bias + place, mask=decay_in, other=0.0)
    rate = tl.load(a_log + head)
    b += first * b_token + head
    raw_beta = tl.load(b)
    z += first * z_token + head * V + at
    gate = tl.load(z, mask=v_in, other=0.0)
    scale = tl.load(norm + at, mask=v_in, other=0.0)
    window = windows + slot * (ROWS * channels) + channel
    x0 = tl.load(window, mask=inside & known, other=0.0)
    x1 = tl.load(window + channels, mask=inside & known, other=0.0)
    x2 = tl.load(window + 2 * channels, mask=inside & known, other=0.0)
    cell = at[:, None] * V + at[None, :]
    cell_in = (at < K)[:, None] & v_in[None, :]
    state = states + (slot * heads + head) * (K * V) + cell
    state = tl.load(state, mask=cell_in & known, other=0.0)
    bias, scale, rate = bias.to(tl.float32), scale.to(tl.float32), tl.exp(rate.to(tl.float32))
    stored, in_place = _owned(inside, write_slot, first, slot, known, head, N, R)
    out += (first * heads + head) * V + at
    for n in range(tl.maximum(length, 0), N):
        tl.store(out + n * heads * V, tl.zeros((W,), out.dtype.element_ty), mask=v_in)
    if length <= 0:
        return
    for n in range(1 if N == 1 else length):
        # The next token's rows, so that they arrive while this one is computed.
        qkv, a, b, z = qkv + qkv_token, a + a_token, b + b_token, z + z_token
        more = n + 1 < length
        next_x = tl.load(qkv, mask=inside & more, other=0.0)
        next_forget = tl.load(a, mask=decay_in & more, other=0.0)
        next_beta = tl.load(b, mask=more, other=0.0)
        next_gate = tl.load(z, mask=v_in & more, other=0.0)
        target = tl.load(write_slot + first + n)

        mixed = _unit_rows(_convolved(x0, x1, x2, x3, w0, w1, w2, w3), K)
        decay = _decay_of(forget, bias, rate, bound, DECAY)
        state, o = _advanced(state, mixed, decay, sigmoid_of(raw_beta.to(tl.float32)), W, DECAY)
        kept = (target >= 0) & (target < slots)
        if kept:  # before the norm, so that it is on its way meanwhile
            tl.store(states + (target * heads + head) * (K * V) + cell, state, mask=cell_in)

        tl.debug_barrier()  # all threads have read the window, which may be stored over
        if R > 1:
            counted = inside & (tl.arange(0, 4) < 2)[:, None] & (in_place & (n == 0))
            count = arrived + sequence * (2 * keys) + channel
            seen = tl.atomic_add(count, 1, mask=counted, sem="relaxed")
        y = _gated_norm(o, gate, scale, eps, V, GATE)
        tl.store(out + n * heads * V, y.to(out.dtype.element_ty), mask=v_in)
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
