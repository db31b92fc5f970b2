"""Triton kernel of one token of each sequence: a value head over two programs.

Legend as in kernels.delta_step.triton; S programs of a head have X = W / S values each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.activation.triton import sigmoid_of
from kernels.delta_step.triton import (
    L2_EPS,
    NUMBERS,
    ROWS,
    P,
    along_keys,
    cells,
    channels_of,
    convolved,
    decay_place,
    faded,
    gated,
    keys_sum,
    known_slot,
    store_rows,
    taps_of,
    values_of,
    window_rows,
)

SPLIT = 2
S: tl.constexpr = tl.constexpr(SPLIT)
SIGN: tl.constexpr = tl.constexpr(-(1 << 31))


@triton.jit
def _word(o, square):
    """An output and the sum of squares of its half in a word that is never 0: of a sum of squares
    the sign is free."""
    low = square.to(tl.int32, bitcast=True) | SIGN
    return (o.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _of_word(word):
    square = (word & 0x7FFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), square


@triton.jit(do_not_specialize=NUMBERS)
def delta_decode(
    qkv, a, b, z, windows, states, conv, a_log, dt_bias, norm, out, read_slot, write_slot, lengths,
    words, arrived, qkv_token, a_token, b_token, z_token, slots, eps, bound,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    DECAY: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """As `kernels.delta_step.triton.delta_step` for one row of each sequence.

    o = S^T q + u (k q) of the decayed S needs no updated state, so that the output is on its way
    before the state is. Its norm needs both halves of V: each thread exchanges its output, and the
    sum of squares of its half, for what is in the words of its place [B, H, S, X], zero before and
    after. Who finds 0 was first and is done; the second has what the first left and finishes: in
    words of half h the values of that half. The data are in the exchange itself, so nothing waits,
    and no order of memory is needed.
    """
    X: tl.constexpr = W // S
    Q: tl.constexpr = 8
    head, part = tl.program_id(0) // S, tl.program_id(0) % S
    sequence, heads = tl.program_id(1), tl.num_programs(0) // S
    keys = (heads // R) * K
    channels = 2 * keys + heads * V
    row = sequence.to(tl.int64)
    # What all layers of a step read stays in the caches.
    read = tl.load(read_slot + sequence, eviction_policy="evict_last")
    target = tl.load(write_slot + sequence, eviction_policy="evict_last")
    length = tl.load(lengths + sequence, eviction_policy="evict_last")

    v_at = values_of(part, X)
    pair, pair_in, value, v_in = channels_of(head, keys, v_at, R, K, V, W)
    qkv += row * qkv_token
    x3 = tl.load(qkv + pair, mask=pair_in, other=0.0)
    v3 = tl.load(qkv + value, mask=v_in, other=0.0)
    w0, w1, w2, w3 = taps_of(conv, pair, pair_in, x3)
    vw0, vw1, vw2, vw3 = taps_of(conv, value, v_in, v3)
    place, decay_in = decay_place(head, K, W, DECAY)
    forget = tl.load(a + row * a_token + place, mask=decay_in, other=0.0)
    bias = tl.load(dt_bias + place, mask=decay_in, other=0.0)
    rate, beta = tl.load(a_log + head), tl.load(b + row * b_token + head)
    half = tl.arange(0, S)[:, None]
    halves = half * X + tl.arange(0, X)[None, :]
    gate = tl.load(z + row * z_token + head * V + halves, mask=halves < V, other=0.0)
    scale = tl.load(norm + halves, mask=halves < V, other=0.0)
    tl.debug_barrier()  # keeps what follows behind these loads
    slot, known = known_slot(read, slots)
    window = windows + slot * (ROWS * channels)
    x0, x1, x2 = window_rows(window + pair, channels, pair_in & known)
    v0, v1, v2 = window_rows(window + value, channels, v_in & known)
    cell, cell_in = cells(v_at, K, V, W, Q)
    state = states + (slot * heads + head) * (K * V) + cell
    state = tl.load(state, mask=cell_in & known, other=0.0)
    bias, scale, rate = bias.to(tl.float32), scale.to(tl.float32), tl.exp(rate.to(tl.float32))
    out += (row * heads + head) * V
    if length <= 0:
        tl.store(out + v_at, tl.zeros((P, X // P), out.dtype.element_ty), mask=v_in)
        return

    mixed = convolved(x0, x1, x2, x3, w0, w1, w2, w3)
    v = convolved(v0, v1, v2, v3, vw0, vw1, vw2, vw3).to(tl.float32)
    state = faded(state, forget, bias, rate, bound, W, Q, DECAY)
    q, k = tl.split(mixed)
    q, k = along_keys(q, W, Q).to(tl.float32), along_keys(k, W, Q).to(tl.float32)
    beta = sigmoid_of(beta.to(tl.float32))
    # All keys are in a warp here, so that no sum waits for another warp.
    q_size, k_size = tl.rsqrt(keys_sum(q * q) + L2_EPS), tl.rsqrt(keys_sum(k * k) + L2_EPS)
    overlap = keys_sum(k * q)
    u = beta * (v - keys_sum(state * k) * k_size) * k_size
    o = (keys_sum(state * q) + overlap * u) * (q_size * K**-0.5)
    square = tl.sum(tl.sum(o * o, 1), 0)

    tl.debug_barrier()  # all threads have read the window, which may be stored over
    in_place = known & (target == slot)
    counted = pair_in & in_place
    count = arrived + sequence * (2 * keys) + pair
    seen = tl.atomic_add(count, 1, mask=counted, sem="relaxed")
    word = tl.broadcast_to(tl.reshape(_word(o, square), (1, X)), (S, X))
    words += (sequence * heads + head) * W + halves
    theirs = tl.atomic_xchg(words, word, sem="relaxed")
    state = state + k * u[None, :, None, :]
    kept = (target >= 0) & (target < slots)
    if kept:
        tl.store(states + (target * heads + head) * (K * V) + cell, state, mask=cell_in)
    second = theirs != 0
    o, _ = _of_word(word)
    their_o, their_square = _of_word(theirs)
    o = tl.where(half == part, o, their_o)
    y = gated(o, square + their_square, gate, scale, eps, V, GATE)
    tl.store(out + halves, y.to(out.dtype.element_ty), mask=second & (halves < V))
    tl.store(words, 0, mask=second)
    last = counted & (seen == R * S - 1)
    tl.store(count, 0, mask=last)
    if kept:
        past = windows + target * (ROWS * channels)
        first = (tl.program_id(0) % (R * S) == 0) & (in_place == 0)
        store_rows(past + pair, channels, x1, x2, x3, last | (pair_in & first))
        store_rows(past + value, channels, v1, v2, v3, v_in)
