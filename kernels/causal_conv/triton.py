"""Triton kernels of the causal convolution: outputs of packed tokens, and new windows.

Legend: T packed tokens, B sequences, C channels, J taps, D dilation, S = (J - 1) D rows of a
window, BC channels of a program and BT tokens, or P rows of L tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.activation.triton import silu_of

FAR: tl.constexpr = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["N", "windows", "first_delay", "step"])
def history_rows(
    token, sequence, offset, rows, N, windows, first_delay, step,
    S: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rows [N, J] of a history behind `windows` rows; delay j is first_delay - j * step."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N * J
    n, delay = at // J, first_delay - (at % J) * step
    back = tl.load(offset + n, mask=mask, other=0) - delay
    in_window = (tl.load(sequence + n, mask=mask, other=0) + 1) * S + back
    in_step = tl.load(token + n, mask=mask, other=0) + (windows - delay)
    tl.store(rows + at, tl.where(back >= 0, in_step, in_window), mask=mask)


@triton.jit(do_not_specialize=["T", "R"])
def conv_rows(
    history, rows, weight, out, T, R, C,
    J: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out [T, C] from rows [T, J] of a history [R, C]; a row that is none counts as zeros."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = channel < C
    total = tl.zeros((BT, BC), tl.float32)
    for j in tl.static_range(J):
        row = tl.load(rows + token * J + j, mask=token < T, other=-1)
        known = ((row >= 0) & (row < R))[:, None] & inside[None, :]
        tap = tl.load(history + (row * C)[:, None] + channel[None, :], mask=known, other=0.0)
        w = tl.load(weight + channel * J + j, mask=inside, other=0.0).to(tl.float32)
        total = total + tap.to(tl.float32) * w[None, :]
    place = out + (token * C)[:, None] + channel[None, :]
    mask = (token < T)[:, None] & inside[None, :]
    tl.store(place, silu_of(total).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_silu(out, total, mask):
    tl.store(out, silu_of(total).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _slide(x, weight, out, token, channel, T, C, x_token, D: tl.constexpr, L: tl.constexpr):
    """L outputs of every row of tokens [P], D tokens apart, of which each row is read once."""
    inside = (channel < C)[None, :]
    at = weight + channel * 4
    w0 = tl.load(at, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    w1 = tl.load(at + 1, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(at + 2, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    w3 = tl.load(at + 3, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    place = x + (token * x_token)[:, None] + channel[None, :]
    to = out + (token * C)[:, None] + channel[None, :]
    step = tl.cast(x_token, tl.int64) * D
    mask = (token < T)[:, None] & inside
    x0 = tl.load(place - 3 * step, mask=mask, other=0.0).to(tl.float32)
    x1 = tl.load(place - 2 * step, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(place - step, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(L):
        mask = (token + i * D < T)[:, None] & inside
        x3 = tl.load(place + i * step, mask=mask, other=0.0).to(tl.float32)
        total = tl.zeros(x3.shape, tl.float32) + x0 * w0
        total = total + x1 * w1
        total = total + x2 * w2
        _store_silu(to + tl.cast(C, tl.int64) * (i * D), total + x3 * w3, mask)
        x0, x1, x2 = x1, x2, x3


@triton.jit
def _gather(
    x, pool, weight, out, sequence_of, read_slot, token, offset, channel, T, B, slots, C, x_token,
    J: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """An output of each token [P], of which taps may lie in the window of its sequence."""
    S: tl.constexpr = (J - 1) * D
    inside = (token < T)[:, None] & (channel < C)[None, :]
    sequence = tl.load(sequence_of + token, mask=token < T, other=-1)
    known = (sequence >= 0) & (sequence < B)
    slot = tl.load(read_slot + sequence, mask=known, other=-1)
    known = known & (slot >= 0) & (slot < slots)
    window = tl.where(known, slot, 0) * S
    total = tl.zeros(inside.shape, tl.float32)
    for j in tl.static_range(J):
        back = offset - (J - 1 - j) * D
        place = x + ((token - (J - 1 - j) * D) * x_token)[:, None] + channel[None, :]
        tap = tl.load(place, mask=inside & (back >= 0)[:, None], other=0.0).to(tl.float32)
        place = pool + ((window + S + back) * C)[:, None] + channel[None, :]
        old = (known & (back < 0) & (back >= -S))[:, None]
        tap = tap + tl.load(place, mask=inside & old, other=0.0).to(tl.float32)
        w = tl.load(weight + channel * J + j, mask=channel < C, other=0.0).to(tl.float32)
        total = total + tap * w[None, :]
    _store_silu(out + (token * C)[:, None] + channel[None, :], total, inside)


@triton.jit(do_not_specialize=["T", "B", "slots"])
def conv_packed(
    x, pool, weight, out, sequence_of, offset_of, read_slot, T, B, slots, C, x_token,
    J: tl.constexpr, D: tl.constexpr, P: tl.constexpr, L: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out [T, C]; taps before a sequence's part of the step lie in its window in the pool.

    A program has P rows of L tokens that are D apart: of each, the next output needs one new tap.
    """
    row = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    start = row // D * (L * D) + row % D
    least = -1
    if (J == 4) & (L > 1):
        every = start[:, None] + (tl.arange(0, L) * D)[None, :]
        offset = tl.load(offset_of + every, mask=every < T, other=FAR)
        least = tl.min(tl.minimum(offset, every))
    if least >= (J - 1) * D:
        _slide(x, weight, out, start, channel, T, C, x_token, D, L)
    else:
        for i in range(L):
            token = start + i * D
            own = tl.minimum(tl.load(offset_of + token, mask=token < T, other=0), token)
            _gather(
                x, pool, weight, out, sequence_of, read_slot, token, own, channel, T, B, slots,
                C, x_token, J, D,
            )  # fmt: skip


@triton.jit(do_not_specialize=["T", "W", "slots"])
def write_windows(
    x, pool, offset_of, read_slot, write_token, write_sequence, write_slot, T, W, slots, C, x_token,
    S: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """The windows that end with tokens `write_token` [W], into their slots.

    A program has all writes of one sequence for some channels: the slot that is read last, after
    no other write needs what is in it.
    """
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.arange(0, ROWS)
    inside = (row < S)[:, None] & (channel < C)[None, :]
    read = tl.load(read_slot + sequence)
    known = (read >= 0) & (read < slots)
    number = tl.arange(0, BW)
    for in_place in tl.static_range(2):
        for start in range(0, W, BW):
            write = start + number
            mine = tl.load(write_sequence + write, mask=write < W, other=-1) == sequence
            target = tl.load(write_slot + write, mask=mine, other=-1)
            token = tl.load(write_token + write, mask=mine, other=-1)
            mine = mine & (target >= 0) & (target < slots) & (token >= 0) & (token < T)
            mine = mine & ((target == read) == (in_place == 1))
            due = tl.min(tl.where(mine, number, BW))
            while due < BW:
                last = tl.load(write_token + start + due)
                offset = tl.minimum(tl.load(offset_of + last), last)
                back = offset + 1 - S + row
                place = x + ((last + 1 - S + row) * x_token)[:, None] + channel[None, :]
                new = tl.load(place, mask=inside & (back >= 0)[:, None], other=0.0)
                place = pool + ((read * S + S + back) * C)[:, None] + channel[None, :]
                kept = known & (back < 0) & (back >= -S)
                old = tl.load(place, mask=inside & kept[:, None], other=0.0)
                value = tl.where((back >= 0)[:, None], new.to(old.dtype), old)
                tl.debug_barrier()  # all threads have read what may be stored over
                to = tl.load(write_slot + start + due)
                place = pool + ((to * S + row) * C)[:, None] + channel[None, :]
                tl.store(place, value, mask=inside)
                due = tl.min(tl.where(mine & (number > due), number, BW))
