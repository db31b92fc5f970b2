"""Triton kernel of recurrent steps of the delta rule: from projections to the normed output.

Legend: B sequences of N rows, H heads (values), G key heads, R = H / G, K key dim, V value dim
(W: the next power of two of both), C = 2 G K + H V channels, S slots. Four taps: a window has
three rows of C channels. P warps share V, Q lanes of a warp share K: a state is a tile
[Q, P, W / Q, W / P] or [W / Q, P, Q, W / P].
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
# The same for every number of sequences and tokens: sums over K then have one order. With more
# warps a multiprocessor has as many, but each exchange between them waits for more.
WARPS = 4
P: tl.constexpr = tl.constexpr(WARPS)
Q: tl.constexpr = tl.constexpr(4)
# Of axes along which nothing is contiguous, Triton deals lanes, then warps, to the first one first
# (3.6) or to the last one (3.7).
RELEASE = tuple(int(number) for number in triton.__version__.split(".")[:2])
FIRST: tl.constexpr = tl.constexpr(RELEASE < (3, 7))
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
def _value_weights(conv, first, V: tl.constexpr, W: tl.constexpr):
    """The four taps of V channels [P, W / P] from `first`, oldest first, a channel at a time."""
    at = tl.arange(0, TAPS * W)
    taps = tl.load(conv + first * TAPS + at, mask=at < TAPS * V, other=0.0)
    even, odd = tl.split(tl.reshape(taps, (P, W // P, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _window_rows(window, channels, mask):
    """The three rows of a window, oldest first."""
    x0 = tl.load(window, mask=mask, other=0.0)
    x1 = tl.load(window + channels, mask=mask, other=0.0)
    x2 = tl.load(window + 2 * channels, mask=mask, other=0.0)
    return x0, x1, x2


@triton.jit
def _store_rows(window, channels, x0, x1, x2, mask):
    tl.store(window, x0, mask=mask)
    tl.store(window + channels, x1, mask=mask)
    tl.store(window + 2 * channels, x2, mask=mask)


@triton.jit
def _convolved(x0, x1, x2, x3, w0, w1, w2, w3):
    """silu of the weighted sum, rounded to the type of x as between two operations."""
    y = x0.to(tl.float32) * w0.to(tl.float32)
    y = y + x1.to(tl.float32) * w1.to(tl.float32)
    y = y + x2.to(tl.float32) * w2.to(tl.float32)
    y = y + x3.to(tl.float32) * w3.to(tl.float32)
    return silu_of(y).to(x3.dtype)


@triton.jit
def _known_slot(read_slot, sequence, slots):
    """The slot that a sequence reads, 0 where it is none, and whether it is one."""
    slot = tl.load(read_slot + sequence)
    known = (slot >= 0) & (slot < slots)
    return tl.where(known, slot, 0), known


@triton.jit
def _decay_place(head, K: tl.constexpr, W: tl.constexpr, DECAY: tl.constexpr):
    """Where in a token the decays of a head are and whether they are: one, or one a key channel.

    Those of channels are [W, 2], each twice, as q and k are: an exchange then has wide words.
    """
    if DECAY == HEAD_DECAY:
        place, inside = head, True
    else:
        at, twice = tl.arange(0, W)[:, None], tl.arange(0, 2)[None, :]
        place, inside = head * K + at + twice * 0, (at < K) & (twice < 2)
    return place, inside


@triton.jit
def _owned(
    pair_in, write_slot, first, slot, known, head, N: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Whose rows of q and k this program stores at once, and whether the read slot is stored."""
    in_place = slot < 0
    if R > 1:
        for n in tl.static_range(N):
            in_place = in_place | (known & (tl.load(write_slot + first + n) == slot))
        pair_in = pair_in & ((head % R == 0) & (in_place == 0))
    return pair_in, in_place


@triton.jit
def _unit_sizes(mixed):
    """1 / the lengths of q and k [W, 2]."""
    return tl.split(tl.rsqrt(tl.sum(mixed * mixed, 0) + L2_EPS))


@triton.jit
def _decay_of(forget, bias, rate, bound, DECAY: tl.constexpr):
    pace = forget.to(tl.float32) + bias
    if DECAY == BOUNDED_DECAY:
        decay = tl.exp(bound * sigmoid_of(pace * rate))
    else:
        decay = tl.exp(-rate * softplus_of(pace))
    return decay


@triton.jit
def _along_keys(x, W: tl.constexpr):
    """A value of each key, to go with a state."""
    x = tl.reshape(x, (Q, 1, W // Q, 1))
    return x if FIRST else tl.permute(x, (2, 1, 0, 3))


@triton.jit
def _faded(state, forget, bias, rate, bound, W: tl.constexpr, DECAY: tl.constexpr):
    """The state times its decays."""
    decay = _decay_of(forget, bias, rate, bound, DECAY)
    if DECAY != HEAD_DECAY:
        decay, _ = tl.split(decay)
        decay = _along_keys(decay, W)
    return state * decay


@triton.jit
def _keys_sum(x):
    """[P, W / P]: first what a thread has, then over Q lanes."""
    return tl.sum(tl.sum(x, 2), 0) if FIRST else tl.sum(tl.sum(x, 0), 1)


@triton.jit
def _cells(K: tl.constexpr, V: tl.constexpr, W: tl.constexpr):
    """Where the tile of a state is in it, and which of it there is. A lane has a run of keys."""
    lane, row = tl.arange(0, Q) * (W // Q), tl.arange(0, W // Q)
    if FIRST:
        k = lane[:, None, None, None] + row[None, None, :, None]
    else:
        k = row[:, None, None, None] + lane[None, None, :, None]
    v = tl.arange(0, P)[:, None] * (W // P) + tl.arange(0, W // P)[None, :]
    v = v[None, :, None, :]
    return k * V + v, (k < K) & (v < V)


@triton.jit
def _gated_norm(o, gate, scale, eps, V: tl.constexpr, GATE: tl.constexpr):
    y = o * tl.rsqrt(tl.sum(tl.sum(o * o, 0), 0) * (1.0 / V) + eps) * scale
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

    Per token: convolution of its channels, unit q and k, decay and beta, then of the decayed S:
    u = beta (v - S^T k), S = S + k u^T, o = S^T q, norm of o, gate.
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
    k_at = tl.arange(0, W)[:, None]
    q_or_k = tl.arange(0, 2)[None, :]
    v_at = tl.arange(0, P)[:, None] * (W // P) + tl.arange(0, W // P)[None, :]
    pair_in, v_in = (k_at < K) & (q_or_k < 2), v_at < V
    pair = (head // R) * K + k_at + q_or_k * keys
    value = 2 * keys + head * V + v_at
    qkv += first * qkv_token
    x3 = tl.load(qkv + pair, mask=pair_in, other=0.0)
    v3 = tl.load(qkv + value, mask=v_in, other=0.0)
    w0, w1, w2, w3 = _row_weights(conv, pair, pair_in)
    vw0, vw1, vw2, vw3 = _value_weights(conv, 2 * keys + head * V, V, W)
    place, decay_in = _decay_place(head, K, W, DECAY)
    a += first * a_token + place
    forget = tl.load(a, mask=decay_in, other=0.0)
    bias = tl.load(dt_bias + place, mask=decay_in, other=0.0)
    rate = tl.load(a_log + head)
    b += first * b_token + head
    raw_beta = tl.load(b)
    z += first * z_token + head * V + v_at
    scale = tl.load(norm + v_at, mask=v_in, other=0.0)
    window = windows + slot * (ROWS * channels)
    x0, x1, x2 = _window_rows(window + pair, channels, pair_in & known)
    v0, v1, v2 = _window_rows(window + value, channels, v_in & known)
    cell, cell_in = _cells(K, V, W)
    state = states + (slot * heads + head) * (K * V) + cell
    state = tl.load(state, mask=cell_in & known, other=0.0)
    bias, scale, rate = bias.to(tl.float32), scale.to(tl.float32), tl.exp(rate.to(tl.float32))
    stored, in_place = _owned(pair_in, write_slot, first, slot, known, head, N, R)
    out += (first * heads + head) * V + v_at
    for n in range(tl.maximum(length, 0), N):
        tl.store(out + n * heads * V, tl.zeros((P, W // P), out.dtype.element_ty), mask=v_in)
    if length <= 0:
        return
    for n in range(1 if N == 1 else length):
        # The next token's rows, so that they arrive while this one is computed.
        qkv, a, b = qkv + qkv_token, a + a_token, b + b_token
        more = n + 1 < length
        next_x = tl.load(qkv + pair, mask=pair_in & more, other=0.0)
        next_v = tl.load(qkv + value, mask=v_in & more, other=0.0)
        next_forget = tl.load(a, mask=decay_in & more, other=0.0)
        next_beta = tl.load(b, mask=more, other=0.0)
        gate = tl.load(z + n * z_token, mask=v_in, other=0.0)
        target = tl.load(write_slot + first + n)

        if N > 1:  # here, before q and k take registers; in decode later, when the state is there
            state = _faded(state, forget, bias, rate, bound, W, DECAY)
        mixed = _convolved(x0, x1, x2, x3, w0, w1, w2, w3)
        v = _convolved(v0, v1, v2, v3, vw0, vw1, vw2, vw3).to(tl.float32)
        q_size, k_size = _unit_sizes(mixed.to(tl.float32))
        if N == 1:
            state = _faded(state, forget, bias, rate, bound, W, DECAY)
        q, k = tl.split(mixed)
        q, k = _along_keys(q, W).to(tl.float32), _along_keys(k, W).to(tl.float32)
        beta = sigmoid_of(raw_beta.to(tl.float32))
        u = beta * (v - _keys_sum(state * k) * k_size)
        state = state + k * (k_size * u)[None, :, None, :]
        kept = (target >= 0) & (target < slots)
        if kept:  # before the output, so that it is on its way meanwhile
            tl.store(states + (target * heads + head) * (K * V) + cell, state, mask=cell_in)
        o = _keys_sum(state * q) * (q_size * K**-0.5)

        tl.debug_barrier()  # all threads have read the window, which may be stored over
        if R > 1:
            counted = pair_in & (in_place & (n == 0))
            count = arrived + sequence * (2 * keys) + pair
            seen = tl.atomic_add(count, 1, mask=counted, sem="relaxed")
        y = _gated_norm(o, gate, scale, eps, V, GATE)
        tl.store(out + n * heads * V, y.to(out.dtype.element_ty), mask=v_in)
        if R > 1:
            last = counted & (seen == R - 1)
            stored = stored | last
            tl.store(count, 0, mask=last)
        if kept:
            past = windows + target * (ROWS * channels)
            _store_rows(past + pair, channels, x1, x2, x3, stored)
            _store_rows(past + value, channels, v1, v2, v3, v_in)
        x0, x1, x2, x3 = x1, x2, x3, next_x
        v0, v1, v2, v3 = v1, v2, v3, next_v
        forget, raw_beta = next_forget, next_beta
