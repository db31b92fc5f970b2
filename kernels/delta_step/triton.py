"""Triton kernel of recurrent steps of the delta rule: from projections to the normed output.

Legend: B sequences of N rows, H heads (values), G key heads, R = H / G, K key dim, V value dim
(W: the next power of two of both), C = 2 G K + H V channels, S slots. Four taps: a window has
three rows of C channels. A program has X values: P warps share them, Q lanes of a warp share K: a
state is a tile [Q, P, W / Q, X / P] or [W / Q, P, Q, X / P].
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
# The same for every number of sequences: sums then have one order.
WARPS = 4
P: tl.constexpr = tl.constexpr(WARPS)
# Of axes along which nothing is contiguous, Triton deals lanes, then warps, to the first one first
# (3.6) or to the last one (3.7).
RELEASE = tuple(int(number) for number in triton.__version__.split(".")[:2])
FIRST: tl.constexpr = tl.constexpr(RELEASE < (3, 7))
NUMBERS = ("qkv_token", "a_token", "b_token", "z_token", "slots")


@triton.jit
def _tap(word, J: tl.constexpr, like):
    return (word >> (16 * J)).to(tl.int16).to(like.dtype, bitcast=True)


@triton.jit
def taps_of(conv, channel, mask, like):
    """The four taps of channels, oldest first, in the type of `like`: a channel's are one word."""
    word = tl.load(conv + channel, mask=mask, other=0)
    return _tap(word, 0, like), _tap(word, 1, like), _tap(word, 2, like), _tap(word, 3, like)


@triton.jit
def window_rows(window, channels, mask):
    """The three rows of a window, oldest first."""
    x0 = tl.load(window, mask=mask, other=0.0)
    x1 = tl.load(window + channels, mask=mask, other=0.0)
    x2 = tl.load(window + 2 * channels, mask=mask, other=0.0)
    return x0, x1, x2


@triton.jit
def store_rows(window, channels, x0, x1, x2, mask):
    tl.store(window, x0, mask=mask)
    tl.store(window + channels, x1, mask=mask)
    tl.store(window + 2 * channels, x2, mask=mask)


@triton.jit
def convolved(x0, x1, x2, x3, w0, w1, w2, w3):
    """silu of the weighted sum, rounded to the type of x as between two operations."""
    y = x0.to(tl.float32) * w0.to(tl.float32)
    y = y + x1.to(tl.float32) * w1.to(tl.float32)
    y = y + x2.to(tl.float32) * w2.to(tl.float32)
    y = y + x3.to(tl.float32) * w3.to(tl.float32)
    return silu_of(y).to(x3.dtype)


@triton.jit
def known_slot(read, slots):
    """The slot that a sequence reads, 0 where it is none, and whether it is one."""
    known = (read >= 0) & (read < slots)
    return tl.where(known, read, 0), known


@triton.jit
def channels_of(
    head, keys, v_at, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr
):
    """The channels of q and k [W, 2] and of the values `v_at` of a head, and which there are."""
    k_at, q_or_k = tl.arange(0, W)[:, None], tl.arange(0, 2)[None, :]
    pair = (head // R) * K + k_at + q_or_k * keys
    return pair, (k_at < K) & (q_or_k < 2), 2 * keys + head * V + v_at, v_at < V


@triton.jit
def decay_place(head, K: tl.constexpr, W: tl.constexpr, DECAY: tl.constexpr):
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
def unit_sizes(mixed):
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
def along_keys(x, W: tl.constexpr, Q: tl.constexpr):
    """A value of each key, to go with a state."""
    x = tl.reshape(x, (Q, 1, W // Q, 1))
    return x if FIRST else tl.permute(x, (2, 1, 0, 3))


@triton.jit
def faded(
    state, forget, bias, rate, bound, W: tl.constexpr, Q: tl.constexpr, DECAY: tl.constexpr
):  # fmt: skip
    """The state times its decays."""
    decay = _decay_of(forget, bias, rate, bound, DECAY)
    if DECAY != HEAD_DECAY:
        decay, _ = tl.split(decay)
        decay = along_keys(decay, W, Q)
    return state * decay


@triton.jit
def keys_sum(x):
    """[P, X / P]: first what a thread has, then over Q lanes."""
    return tl.sum(tl.sum(x, 2), 0) if FIRST else tl.sum(tl.sum(x, 0), 1)


@triton.jit
def cells(v_at, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, Q: tl.constexpr):
    """Where the tile of a state with values `v_at` [P, X / P] is in it, and which of it there is.
    A lane has a run of keys."""
    lane, row = tl.arange(0, Q) * (W // Q), tl.arange(0, W // Q)
    if FIRST:
        k = lane[:, None, None, None] + row[None, None, :, None]
    else:
        k = row[:, None, None, None] + lane[None, None, :, None]
    v = v_at[None, :, None, :]
    return k * V + v, (k < K) & (v < V)


@triton.jit
def values_of(part, X: tl.constexpr):
    """The values [P, X / P] of a program."""
    return part * X + tl.arange(0, P)[:, None] * (X // P) + tl.arange(0, X // P)[None, :]


@triton.jit
def gated(o, square, gate, scale, eps, V: tl.constexpr, GATE: tl.constexpr):
    """The norm of outputs whose squares have the sum `square`, times their gates."""
    y = o * tl.rsqrt(square * (1.0 / V) + eps) * scale
    opening = gate.to(tl.float32)
    return y * (silu_of(opening) if GATE == SILU_GATE else sigmoid_of(opening))


@triton.jit
def _owned(pair_in, write_slot, first, slot, known, head, N: tl.constexpr, R: tl.constexpr):
    """Whose rows of q and k this program stores at once, and whether the read slot is stored."""
    in_place = slot < 0
    if R > 1:
        for n in tl.static_range(N):
            in_place = in_place | (known & (tl.load(write_slot + first + n) == slot))
        pair_in = pair_in & ((head % R == 0) & (in_place == 0))
    return pair_in, in_place


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
    Q: tl.constexpr = 4
    head, sequence = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0)
    keys = (heads // R) * K
    channels = 2 * keys + heads * V
    first = (sequence * N).to(tl.int64)
    read = tl.load(read_slot + sequence)
    length = tl.maximum(tl.minimum(tl.load(lengths + sequence), N), 0).to(tl.int32)

    # Everything that the first token needs is asked for before any of it is used: what does not
    # wait for the slot number first, and the state last, of which the convolution needs nothing.
    v_at = values_of(0, W)
    pair, pair_in, value, v_in = channels_of(head, keys, v_at, R, K, V, W)
    qkv += first * qkv_token
    x3 = tl.load(qkv + pair, mask=pair_in, other=0.0)
    v3 = tl.load(qkv + value, mask=v_in, other=0.0)
    w0, w1, w2, w3 = taps_of(conv, pair, pair_in, x3)
    vw0, vw1, vw2, vw3 = taps_of(conv, value, v_in, v3)
    place, decay_in = decay_place(head, K, W, DECAY)
    a += first * a_token + place
    forget = tl.load(a, mask=decay_in, other=0.0)
    bias = tl.load(dt_bias + place, mask=decay_in, other=0.0)
    rate = tl.load(a_log + head)
    b += first * b_token + head
    raw_beta = tl.load(b)
    z += first * z_token + head * V + v_at
    scale = tl.load(norm + v_at, mask=v_in, other=0.0)
    tl.debug_barrier()  # keeps what follows behind these loads
    slot, known = known_slot(read, slots)
    window = windows + slot * (ROWS * channels)
    x0, x1, x2 = window_rows(window + pair, channels, pair_in & known)
    v0, v1, v2 = window_rows(window + value, channels, v_in & known)
    cell, cell_in = cells(v_at, K, V, W, Q)
    state = states + (slot * heads + head) * (K * V) + cell
    state = tl.load(state, mask=cell_in & known, other=0.0)
    bias, scale, rate = bias.to(tl.float32), scale.to(tl.float32), tl.exp(rate.to(tl.float32))
    stored, in_place = _owned(pair_in, write_slot, first, slot, known, head, N, R)
    out += (first * heads + head) * V + v_at
    for n in range(length, N):
        tl.store(out + n * heads * V, tl.zeros((P, W // P), out.dtype.element_ty), mask=v_in)
    if length == 0:
        return
    for n in range(length):
        # The next token's rows, so that they arrive while this one is computed.
        qkv, a, b = qkv + qkv_token, a + a_token, b + b_token
        more = n + 1 < length
        next_x = tl.load(qkv + pair, mask=pair_in & more, other=0.0)
        next_v = tl.load(qkv + value, mask=v_in & more, other=0.0)
        next_forget = tl.load(a, mask=decay_in & more, other=0.0)
        next_beta = tl.load(b, mask=more, other=0.0)
        gate = tl.load(z + n * z_token, mask=v_in, other=0.0)
        target = tl.load(write_slot + first + n)

        state = faded(state, forget, bias, rate, bound, W, Q, DECAY)
        mixed = convolved(x0, x1, x2, x3, w0, w1, w2, w3)
        v = convolved(v0, v1, v2, v3, vw0, vw1, vw2, vw3).to(tl.float32)
        q_size, k_size = unit_sizes(mixed.to(tl.float32))
        q, k = tl.split(mixed)
        q, k = along_keys(q, W, Q).to(tl.float32), along_keys(k, W, Q).to(tl.float32)
        beta = sigmoid_of(raw_beta.to(tl.float32))
        u = beta * (v - keys_sum(state * k) * k_size)
        state = state + k * (k_size * u)[None, :, None, :]
        kept = (target >= 0) & (target < slots)
        if kept:  # before the output, so that it is on its way meanwhile
            tl.store(states + (target * heads + head) * (K * V) + cell, state, mask=cell_in)
        o = keys_sum(state * q) * (q_size * K**-0.5)

        tl.debug_barrier()  # all threads have read the window, which may be stored over
        if R > 1:
            counted = pair_in & (in_place & (n == 0))
            count = arrived + sequence * (2 * keys) + pair
            seen = tl.atomic_add(count, 1, mask=counted, sem="relaxed")
        y = gated(o, tl.sum(tl.sum(o * o, 0), 0), gate, scale, eps, V, GATE)
        tl.store(out + n * heads * V, y.to(out.dtype.element_ty), mask=v_in)
        if R > 1:
            last = counted & (seen == R - 1)
            stored = stored | last
            tl.store(count, 0, mask=last)
        if kept:
            past = windows + target * (ROWS * channels)
            store_rows(past + pair, channels, x1, x2, x3, stored)
            store_rows(past + value, channels, v1, v2, v3, v_in)
        x0, x1, x2, x3 = x1, x2, x3, next_x
        v0, v1, v2, v3 = v1, v2, v3, next_v
        forget, raw_beta = next_forget, next_beta
