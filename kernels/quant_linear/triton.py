"""Triton kernels of the quantised linear layer: matrix-vector, and matrix-matrix on tensor cores.

Legend: M rows of x, N outputs, K inputs, KB bytes of a weight row (K, or K / 2 of four-bit codes,
padded to whole blocks), S splits of K. Constants: FORMAT and SCALE codes of decode.py, BN rows of
weights and BKB bytes of each that a program reads at a time, GROUP the bytes that one scale covers.
The order of codes within a row is "fragments", see README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.quant_linear.decode import (
    E8M0_,
    FP8_,
    FP32_,
    INT4_,
    MXFP4_,
    decoded,
    e2m1_of_word,
    e4m3_of_word,
    scale_of,
    scale_word,
    u4_of_word,
    zero_of,
)


@triton.jit
def row_words(K, FORMAT: tl.constexpr):
    """Words of a row of codes: whole blocks of 16, of 64 k (fp8) or 128."""
    return tl.cdiv(K, 64) * 16 if FORMAT == FP8_ else tl.cdiv(K, 128) * 16


@triton.jit
def row_scales(K, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """Scales of a row, or of a row of blocks."""
    return tl.cdiv(K, GROUP) if FORMAT == FP8_ else tl.cdiv(K, 8 * GROUP) * 4


@triton.jit
def scale_words(K, FORMAT: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr):
    """Words of a row of scales."""
    count = row_scales(K, FORMAT, GROUP)
    return count if SCALE == FP32_ else (count // 4 if SCALE == E8M0_ else count // 2)


@triton.jit
def finish(y, partial, counters, value, offsets, mask, size, tile, split, SPLIT: tl.constexpr):
    """Store a tile, or add up the tiles of all splits in the order of the splits.

    The program that comes last adds, so the order of the sum never depends on the order of the
    programs; it sets the counter back to zero for the next launch.
    """
    if SPLIT == 1:
        tl.store(y + offsets, value.to(y.dtype.element_ty), mask=mask)
    else:
        tl.store(partial + split * size + offsets, value, mask=mask)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            total = tl.zeros_like(value)
            for s in range(SPLIT):
                total += tl.load(
                    partial + s * size + offsets, mask=mask, other=0.0, cache_modifier=".cg"
                )
            tl.store(y + offsets, total.to(y.dtype.element_ty), mask=mask)
            tl.store(counters + tile, 0)


@triton.jit
def _quarters(x):
    """[W, 4] as the four columns."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _factors(x_tile, FORMAT: tl.constexpr, W: tl.constexpr):
    """x [W * codes of a word] in the order of k as factors [W] of the places of each word."""
    SLOTS: tl.constexpr = 4 if FORMAT == FP8_ else 8
    places = tl.permute(tl.reshape(x_tile, (W // 16, SLOTS, 16)), (0, 2, 1))
    if FORMAT == FP8_:
        return _quarters(tl.reshape(places, (W, 4)))
    else:
        even, odd = tl.split(tl.reshape(places, (W, 4, 2)))
        x0, x2, x4, x6 = _quarters(even)
        x1, x3, x5, x7 = _quarters(odd)
        return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _product(words, x, FORMAT: tl.constexpr, PLACE: tl.constexpr):
    """The code at PLACE of each word times x [W], 2^-30, 2^-26 and 2^-49 of the true one.

    x carries 2^90 (fp8) or 2^100, so that sums stay far from the subnormals whatever the codes'
    bias; less in INT4, whose first six nibbles lie at growing powers of 16.
    """
    if FORMAT == FP8_:
        return e4m3_of_word(words, PLACE) * (x * 2.0**90)[None, :]
    elif FORMAT == MXFP4_:
        return e2m1_of_word(words, PLACE) * (x * 2.0**100)[None, :]
    else:
        return u4_of_word(words, PLACE) * (x * 2.0 ** (100 - 4 * (PLACE % 6)))[None, :]


@triton.jit
def _words_of_units(words, BN: tl.constexpr, U: tl.constexpr):
    """[BN, words] as four [BN, U]: the words of each 16 bytes."""
    even, odd = tl.split(tl.reshape(words, (BN, U, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def vector_product(
    x, words, scales, zeros, rows, row_mask, K, first, stop,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr,
    ASYMMETRIC: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BKB: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 [BN]: the weights' `rows` times x [K], over the steps `first` to `stop` of BKB bytes."""
    W: tl.constexpr = BKB // 4
    U: tl.constexpr = BKB // 16
    SLOTS: tl.constexpr = 4 if FORMAT == FP8_ else 8
    BK: tl.constexpr = SLOTS * W
    SHIFT: tl.constexpr = 30 if FORMAT == FP8_ else (26 if FORMAT == MXFP4_ else 49)
    GROUPS: tl.constexpr = 64 // GROUP if GROUP < 64 else 1  # of a block
    EACH: tl.constexpr = SLOTS // GROUPS
    PER_WORD: tl.constexpr = 1 if SCALE == FP32_ else (4 if SCALE == E8M0_ else 2)
    w = tl.arange(0, W)
    k = tl.arange(0, BK)
    stride = row_words(K, FORMAT)
    row_codes = words + rows.to(tl.int64)[:, None] * stride
    # Scales are read in one dimension, which puts them into the layout of the sums.
    own_row = tl.reshape(tl.broadcast_to(rows[:, None], (BN, U)), (BN * U,))
    own_mask = tl.reshape(tl.broadcast_to(row_mask[:, None], (BN, U)), (BN * U,))
    own_unit = tl.arange(0, BN * U) % U
    row_count = row_scales(K, FORMAT, GROUP)
    scale_rows = (own_row // BLOCK_N).to(tl.int64) * scale_words(K, FORMAT, GROUP, SCALE)
    zero_rows = own_row.to(tl.int64) * (row_scales(K, FORMAT, GROUP) // 4)
    acc = tl.zeros((BN, U), tl.float32)
    for step in tl.range(first, stop, num_stages=STAGES):
        at = step * BKB + 16 * own_unit
        word_mask = row_mask[:, None]
        scale_mask = own_mask
        if not EVEN:
            word_mask = word_mask & (step * W + w < stride)[None, :]
            scale_mask = scale_mask & (at // 4 < stride)
        codes = tl.load(row_codes + (step * W + w)[None, :], mask=word_mask, other=0)
        entry = at // 64 * GROUPS if GROUPS > 1 else at // GROUP
        word = scale_word(scales, scale_rows, entry, scale_mask, SCALE)
        if ASYMMETRIC:  # of all groups of a block
            zero_word = tl.load(zeros + zero_rows + entry // 4, mask=scale_mask, other=0)
        # x last: the barriers of its change of layout keep the loads above together at the start.
        if EVEN:
            x_tile = tl.load(x + step * BK + k).to(tl.float32)
        else:
            x_tile = tl.load(x + step * BK + k, mask=step * BK + k < K, other=0.0).to(tl.float32)
        places = _factors(x_tile, FORMAT, W)
        of_unit = _words_of_units(codes, BN, U)
        for g in tl.static_range(GROUPS):
            if g > 0 and g % PER_WORD == 0:
                there = scale_mask if EVEN else scale_mask & (entry + g < row_count)
                word = scale_word(scales, scale_rows, entry + g, there, SCALE)
            sums = tl.zeros((BN, U), tl.float32)
            total = tl.zeros((U,), tl.float32)
            for place in tl.static_range(g * EACH, g * EACH + EACH):
                factors = _quarters(tl.reshape(places[place], (U, 4)))
                for i in tl.static_range(4):
                    sums += _product(of_unit[i], factors[i], FORMAT, place)
                    total += factors[i]
            if FORMAT == INT4_:
                # In the unit of the sums of products, 2^-49.
                offset = total[None, :] * 2.0**-49
                if ASYMMETRIC:
                    sums -= (
                        tl.reshape(zero_of(zero_word, g if GROUPS == 4 else entry + g), (BN, U))
                        * offset
                    )
                else:
                    sums -= 8.0 * offset
            s = scale_of(word, g if GROUPS >= PER_WORD else entry + g, 0, SCALE)
            acc += tl.reshape(s, (BN, U)) * sums
    return tl.sum(acc, 1) * 2.0**SHIFT


@triton.jit
def matrix_vector(
    x, words, scales, zeros, y, partial, counters, N, K,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr,
    ASYMMETRIC: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BKB: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[N] = x[K] W^T in fp32 without tensor cores: bound by the bytes of W.

    words are the code bytes as int32; a thread reads 16 bytes of a row at a time, and a scale is
    applied once for them, or twice for short groups. Two to four instructions a weight, none of
    them a conversion.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tile * BN + tl.arange(0, BN)
    row_mask = rows < N
    KB = 4 * row_words(K, FORMAT)
    steps = tl.cdiv(tl.cdiv(KB, BKB), SPLIT)
    first = split * steps
    value = vector_product(
        x, words, scales, zeros, rows, row_mask, K, first,
        tl.minimum(first + steps, tl.cdiv(KB, BKB)), FORMAT, GROUP, BLOCK_N, SCALE, ASYMMETRIC,
        EVEN, BN, BKB, STAGES,
    )  # fmt: skip
    finish(y, partial, counters, value, rows, row_mask, N, tile, split, SPLIT)


@triton.jit
def matrix_product(
    row_x, row_mask, words, scales, zeros, columns, column_mask, K, first, stop,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr,
    ASYMMETRIC: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BKB: tl.constexpr, SCALE_WEIGHT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """fp32 [BM, BN]: the rows of x at `row_x` [BM, 1] times the weights' rows `columns` [BN], over
    the bytes `first` to `stop` of a row of weights.

    Each slot of the words is a product of its own with 16 neighbouring k of each block, so that
    a weight stays in the place of its word. scales are words of 32 bits.
    """
    SLOTS: tl.constexpr = 4 if FORMAT == FP8_ else 8
    HALF: tl.constexpr = SLOTS // 2
    # Bytes at a time: those that share a scale, at least a block.
    SPAN: tl.constexpr = 64 if GROUP < 64 else GROUP
    PART: tl.constexpr = BKB if BKB < SPAN else SPAN
    GROUPS: tl.constexpr = 64 // GROUP if GROUP < 64 else 1  # of a block
    EACH: tl.constexpr = SLOTS // GROUPS
    PER_WORD: tl.constexpr = 1 if SCALE == FP32_ else (4 if SCALE == E8M0_ else 2)
    W: tl.constexpr = PART // 4
    stride = row_words(K, FORMAT)
    own_words = words + columns.to(tl.int64)[:, None] * stride
    own_scales = (columns // BLOCK_N).to(tl.int64) * scale_words(K, FORMAT, GROUP, SCALE)
    row_count = row_scales(K, FORMAT, GROUP)
    own_zeros = columns.to(tl.int64) * (row_count // 4)
    w = tl.arange(0, W)
    own_k = w // 16 * (16 * SLOTS) + w % 16
    acc = tl.zeros((BM, BN), tl.float32)
    for kb in range(first, stop, BKB):
        group = tl.zeros((BM, BN), tl.float32)
        for part in tl.static_range(BKB // PART):
            at = kb + part * PART
            word_mask = column_mask[:, None]
            scale_mask = column_mask
            if not EVEN:
                word_mask = word_mask & (at // 4 + w < stride)[None, :]
                scale_mask = scale_mask & (at // 4 < stride)
            q = tl.load(own_words + (at // 4 + w)[None, :], mask=word_mask, other=0)
            low = q.to(tl.int16)
            high = (q >> 16).to(tl.int16)
            entry = at // 64 * GROUPS if GROUPS > 1 else at // GROUP
            if ASYMMETRIC:  # of all groups of a block
                zero_word = tl.load(zeros + own_zeros + entry // 4, mask=scale_mask, other=0)
            for slot in tl.static_range(SLOTS):
                if slot % EACH == 0:
                    if slot // EACH % PER_WORD == 0:
                        there = scale_mask
                        if not EVEN:
                            there = there & (entry + slot // EACH < row_count)
                        word = scale_word(scales, own_scales, entry + slot // EACH, there, SCALE)
                    place = slot // EACH if GROUPS >= PER_WORD else entry + slot // EACH
                    s = scale_of(word, place, 126, SCALE)
                    z = s
                    if ASYMMETRIC:
                        z = zero_of(
                            zero_word, slot // EACH if GROUPS == 4 else entry + slot // EACH
                        )
                k = at * (SLOTS // 4) + 16 * slot + own_k
                x_mask = row_mask
                if not EVEN:
                    x_mask = x_mask & (k < K)[None, :]
                x = tl.load(row_x + k[None, :], mask=x_mask, other=0.0).to(tl.bfloat16)
                halves = low if slot < HALF else high
                weight = decoded(halves, s, z, FORMAT, ASYMMETRIC, slot % HALF, SCALE_WEIGHT, PTX)
                if SCALE_WEIGHT:
                    acc = tl.dot(x, tl.trans(weight), acc)
                else:
                    group = tl.dot(x, tl.trans(weight), group)
        if not SCALE_WEIGHT:
            acc += group * s[None, :]
    return acc * 256.0 if FORMAT == INT4_ else acc


@triton.jit(do_not_specialize=["M"])
def matrix_matrix(
    x, words, scales, zeros, y, partial, counters, M, N, K,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr,
    ASYMMETRIC: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BKB: tl.constexpr, SPLIT: tl.constexpr, SCALE_WEIGHT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """y[M, N] = x[M, K] W^T with bf16 operands and fp32 sums.

    SCALE_WEIGHT: the scale multiplies the weight in bf16 (one rounding unless it is a power of
    two), else it multiplies the fp32 sum of each group, which then must span BKB.
    """
    tiles_m = tl.cdiv(M, BM)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    # Programs that run at the same time share rows of weights: M fastest within 8 tiles of N.
    tiles_n = tl.cdiv(N, BN)
    band = tile // (8 * tiles_m)
    width = tl.minimum(tiles_n - 8 * band, 8)
    within = tile % (8 * tiles_m)
    rows = (within // width) * BM + tl.arange(0, BM)
    columns = (8 * band + within % width) * BN + tl.arange(0, BN)
    row_mask = rows[:, None] < M
    column_mask = columns < N
    KB = 4 * row_words(K, FORMAT)
    row_x = x + rows.to(tl.int64)[:, None] * K
    steps = tl.cdiv(tl.cdiv(KB, BKB), SPLIT)
    first = split * steps * BKB
    acc = matrix_product(
        row_x, row_mask, words, scales, zeros, columns, column_mask, K, first,
        tl.minimum(first + steps * BKB, KB), FORMAT, GROUP, BLOCK_N, SCALE, ASYMMETRIC, EVEN, BM,
        BN, BKB, SCALE_WEIGHT, PTX,
    )  # fmt: skip
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    size = M.to(tl.int64) * N
    mask = row_mask & column_mask[None, :]
    finish(y, partial, counters, acc, offsets, mask, size, tile, split, SPLIT)
