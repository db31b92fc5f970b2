"""Triton kernels of the quantised linear layer: matrix-vector, and matrix-matrix on tensor cores.

Legend: M rows of x, N outputs, K inputs, KB bytes of a weight row (K, or K / 2 of four-bit codes),
S splits of K. Constants: FORMAT one of the codes below, BN rows of weights and BKB bytes of each
that a program reads at a time, GROUP the bytes that one scale covers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.quant_linear.decode import (
    e2m1_of_word,
    e2m1_to_bf16,
    e4m3_of_word,
    e4m3_to_bf16,
    times_bf16,
    u4_of_word,
    u4_to_bf16,
)

# Codes of FORMAT.
FP8, INT4, MXFP4 = 0, 1, 2
FP8_: tl.constexpr = tl.constexpr(FP8)
INT4_: tl.constexpr = tl.constexpr(INT4)
MXFP4_: tl.constexpr = tl.constexpr(MXFP4)


@triton.jit
def _e8m0_to_fp32(code, SHIFT: tl.constexpr):
    """2^(code - 127 + SHIFT), for codes up to 254 - SHIFT."""
    return ((code.to(tl.int32) + SHIFT) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale_fp32(pointers, mask, SHIFT: tl.constexpr, FACTOR: tl.constexpr, E8M0: tl.constexpr):
    """The scales at `pointers` times FACTOR = 2^SHIFT."""
    if E8M0:
        return _e8m0_to_fp32(tl.load(pointers, mask=mask, other=0), SHIFT)
    else:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * FACTOR


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
            for s in tl.static_range(SPLIT):
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
def _word_products(words, x_tile, FORMAT: tl.constexpr, W: tl.constexpr):
    """Code times x, summed over each word: words [BN, W], x_tile fp32 [W * codes of a word].

    x carries 2^90 (fp8) or 2^100, so the sums are 2^-30, 2^-26 and 2^-49 of the true ones: far
    from the subnormals whatever the codes' bias.
    """
    if FORMAT == FP8_:
        x0, x1, x2, x3 = _quarters(tl.reshape(x_tile * 2.0**90, (W, 4)))
        sums = e4m3_of_word(words, 0) * x0[None, :]
        sums += e4m3_of_word(words, 1) * x1[None, :]
        sums += e4m3_of_word(words, 2) * x2[None, :]
        sums += e4m3_of_word(words, 3) * x3[None, :]
    else:
        # Halves order: nibble 2 b + h of word w of a unit is k = 16 h + 4 w + b of its 32.
        unit = tl.reshape(x_tile, (W // 4, 2, 4, 4))
        low, high = tl.split(tl.permute(unit, (0, 2, 3, 1)))
        x0, x2, x4, x6 = _quarters(tl.reshape(low, (W, 4)))
        x1, x3, x5, x7 = _quarters(tl.reshape(high, (W, 4)))
        if FORMAT == MXFP4_:
            sums = e2m1_of_word(words, 0) * (x0 * 2.0**100)[None, :]
            sums += e2m1_of_word(words, 1) * (x1 * 2.0**100)[None, :]
            sums += e2m1_of_word(words, 2) * (x2 * 2.0**100)[None, :]
            sums += e2m1_of_word(words, 3) * (x3 * 2.0**100)[None, :]
            sums += e2m1_of_word(words, 4) * (x4 * 2.0**100)[None, :]
            sums += e2m1_of_word(words, 5) * (x5 * 2.0**100)[None, :]
            sums += e2m1_of_word(words, 6) * (x6 * 2.0**100)[None, :]
            sums += e2m1_of_word(words, 7) * (x7 * 2.0**100)[None, :]
        else:
            # Six nibbles lie at growing powers of 16, the last two at the first two places again.
            sums = u4_of_word(words, 0) * (x0 * 2.0**100)[None, :]
            sums += u4_of_word(words, 1) * (x1 * 2.0**96)[None, :]
            sums += u4_of_word(words, 2) * (x2 * 2.0**92)[None, :]
            sums += u4_of_word(words, 3) * (x3 * 2.0**88)[None, :]
            sums += u4_of_word(words, 4) * (x4 * 2.0**84)[None, :]
            sums += u4_of_word(words, 5) * (x5 * 2.0**80)[None, :]
            sums += u4_of_word(words, 6) * (x6 * 2.0**100)[None, :]
            sums += u4_of_word(words, 7) * (x7 * 2.0**96)[None, :]
    return sums


@triton.jit
def vector_product(
    x, words, scales, zeros, rows, row_mask, K, first, stop,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, E8M0: tl.constexpr,
    ASYMMETRIC: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BKB: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 [BN]: the weights' `rows` times x [K], over the steps `first` to `stop` of BKB bytes."""
    W: tl.constexpr = BKB // 4
    U: tl.constexpr = BKB // 16
    BK: tl.constexpr = BKB if FORMAT == FP8_ else 2 * BKB
    SHIFT: tl.constexpr = 30 if FORMAT == FP8_ else (26 if FORMAT == MXFP4_ else 49)
    FACTOR: tl.constexpr = 2.0**SHIFT
    KB = K if FORMAT == FP8_ else K // 2
    w = tl.arange(0, W)
    unit = tl.arange(0, U)
    k = tl.arange(0, BK)
    KG = tl.cdiv(KB, GROUP)
    stride = KB // 4 if FORMAT == FP8_ else tl.multiple_of(KB // 4, 4)
    row_words = words + rows.to(tl.int64)[:, None] * stride
    row_scales = (rows // BLOCK_N).to(tl.int64)[:, None] * KG
    acc = tl.zeros((BN, U), tl.float32)
    for step in tl.range(first, stop, num_stages=STAGES):
        word_mask = row_mask[:, None]
        scale_mask = row_mask[:, None]
        group = (step * BKB + 16 * unit) // GROUP
        if not EVEN:
            word_mask = word_mask & (step * W + w < stride)[None, :]
            scale_mask = scale_mask & (group < KG)[None, :]
        codes = tl.load(row_words + (step * W + w)[None, :], mask=word_mask, other=0)
        scale_at = row_scales + group[None, :]
        s = _scale_fp32(scales + scale_at, scale_mask, SHIFT, FACTOR, E8M0)
        if ASYMMETRIC:
            zero = tl.load(zeros + scale_at, mask=scale_mask, other=0).to(tl.float32)
        # x last: the barriers of its change of layout keep the loads above together at the start.
        if EVEN:
            x_tile = tl.load(x + step * BK + k).to(tl.float32)
        else:
            x_tile = tl.load(x + step * BK + k, mask=step * BK + k < K, other=0.0).to(tl.float32)
        sums = _word_products(codes, x_tile, FORMAT, W)
        sums = tl.sum(tl.reshape(sums, (BN, U, 4)), 2)
        if FORMAT == INT4_:
            # In the unit of the sums, 2^-49.
            offset = tl.sum(tl.reshape(x_tile, (U, 32)), 1) * 2.0**-49
            if ASYMMETRIC:
                sums -= zero * offset[None, :]
            else:
                sums -= (8.0 * offset)[None, :]
        acc += s * sums
    return tl.sum(acc, 1)


@triton.jit
def matrix_vector(
    x, words, scales, zeros, y, partial, counters, N, K,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, E8M0: tl.constexpr,
    ASYMMETRIC: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BKB: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[N] = x[K] W^T in fp32 without tensor cores: bound by the bytes of W.

    words are the code bytes as int32; a thread reads 16 bytes of a row at a time, and a scale is
    applied once for them. Two to four instructions a weight, none of them a conversion.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tile * BN + tl.arange(0, BN)
    row_mask = rows < N
    KB = K if FORMAT == FP8_ else K // 2
    steps = tl.cdiv(tl.cdiv(KB, BKB), SPLIT)
    first = split * steps
    value = vector_product(
        x, words, scales, zeros, rows, row_mask, K, first,
        tl.minimum(first + steps, tl.cdiv(KB, BKB)), FORMAT, GROUP, BLOCK_N, E8M0, ASYMMETRIC,
        EVEN, BN, BKB, STAGES,
    )  # fmt: skip
    finish(y, partial, counters, value, rows, row_mask, N, tile, split, SPLIT)


@triton.jit
def _weight_scale(pointers, mask, E8M0: tl.constexpr, SHIFT: tl.constexpr):
    """bf16 scales times 2^SHIFT (e8m0 alone), for weights in bf16."""
    if E8M0:
        code = tl.load(pointers, mask=mask, other=0).to(tl.uint16)
        return ((code + SHIFT) << 7).to(tl.bfloat16, bitcast=True)
    else:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.bfloat16)


@triton.jit
def _spread(groups, BN: tl.constexpr, GROUPS: tl.constexpr, BYTES: tl.constexpr):
    """[BN, GROUPS] to [BN, GROUPS * BYTES], each value repeated."""
    wide = tl.broadcast_to(groups[:, :, None], (BN, GROUPS, BYTES))
    return tl.reshape(wide, (BN, GROUPS * BYTES))


@triton.jit
def matrix_product(
    row_x, row_mask, codes, scales, zeros, columns, column_mask, K, first, stop,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, E8M0: tl.constexpr,
    ASYMMETRIC: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BKB: tl.constexpr, SCALE_WEIGHT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """fp32 [BM, BN]: the rows of x at `row_x` [BM, 1] times the weights' rows `columns` [BN], over
    the bytes `first` to `stop` of a row of weights.
    """
    KB = K if FORMAT == FP8_ else tl.multiple_of(K // 2, 16)
    KG = tl.cdiv(KB, GROUP)
    c = tl.arange(0, BKB)
    row_codes = codes + columns.to(tl.int64)[:, None] * KB
    row_scales = (columns // BLOCK_N).to(tl.int64) * KG
    acc = tl.zeros((BM, BN), tl.float32)
    for kb in range(first, stop, BKB):
        weight_mask = column_mask[:, None]
        if not EVEN:
            weight_mask = weight_mask & (kb + c < KB)[None, :]
        q = tl.load(row_codes + (kb + c)[None, :], mask=weight_mask, other=0)
        if FORMAT == FP8_:
            x_mask = row_mask
            if not EVEN:
                x_mask = x_mask & (kb + c < KB)[None, :]
            xs = tl.load(row_x + (kb + c)[None, :], mask=x_mask, other=0.0).to(tl.bfloat16)
            w = e4m3_to_bf16(q, PTX)
            at = scales + row_scales + kb // GROUP
            if SCALE_WEIGHT:
                s = _weight_scale(at, column_mask, E8M0, 0)
                w = times_bf16(w, tl.broadcast_to(s[:, None], (BN, BKB)), PTX)
                acc = tl.dot(xs, tl.trans(w), acc)
            else:
                s = _scale_fp32(at, column_mask, 0, 1.0, E8M0)
                acc += tl.dot(xs, tl.trans(w)) * s[None, :]
        else:
            k = 2 * kb + (c // 16) * 32 + c % 16
            low_mask = row_mask
            high_mask = row_mask
            if not EVEN:
                low_mask = row_mask & (k < K)[None, :]
                high_mask = row_mask & (k + 16 < K)[None, :]
            x_low = tl.load(row_x + k[None, :], mask=low_mask, other=0.0).to(tl.bfloat16)
            x_high = tl.load(row_x + (k + 16)[None, :], mask=high_mask, other=0.0).to(tl.bfloat16)
            GROUPS: tl.constexpr = BKB // GROUP if BKB > GROUP else 1
            SPAN: tl.constexpr = BKB // GROUPS
            g = kb // GROUP + tl.arange(0, GROUPS)
            at = row_scales[:, None] + g[None, :]
            at_mask = column_mask[:, None]
            if not EVEN:
                at_mask = at_mask & (g < KG)[None, :]
            if SCALE_WEIGHT:
                SHIFT: tl.constexpr = 126 if FORMAT == MXFP4_ else 0
                s = _spread(_weight_scale(scales + at, at_mask, E8M0, SHIFT), BN, GROUPS, SPAN)
            if FORMAT == MXFP4_:
                low, high = e2m1_to_bf16(q, s, PTX)
            else:
                if ASYMMETRIC:
                    z = tl.load(zeros + at, mask=at_mask, other=8).to(tl.int32)
                    offset = (-128 - z).to(tl.float32).to(tl.bfloat16)
                    offset = _spread(offset, BN, GROUPS, SPAN)
                else:
                    offset = tl.full((BN, BKB), -136.0, tl.float32).to(tl.bfloat16)
                low, high = u4_to_bf16(q, offset, PTX)
                if SCALE_WEIGHT:
                    low = times_bf16(low, s, PTX)
                    high = times_bf16(high, s, PTX)
            if SCALE_WEIGHT:
                acc = tl.dot(x_low, tl.trans(low), acc)
                acc = tl.dot(x_high, tl.trans(high), acc)
            else:
                s = _scale_fp32(scales + row_scales + kb // GROUP, column_mask, 0, 1.0, E8M0)
                part = tl.dot(x_low, tl.trans(low))
                part = tl.dot(x_high, tl.trans(high), part)
                acc += part * s[None, :]
    return acc


@triton.jit(do_not_specialize=["M"])
def matrix_matrix(
    x, codes, scales, zeros, y, partial, counters, M, N, K,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, E8M0: tl.constexpr,
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
    KB = K if FORMAT == FP8_ else K // 2
    row_x = x + rows.to(tl.int64)[:, None] * K
    steps = tl.cdiv(tl.cdiv(KB, BKB), SPLIT)
    first = split * steps * BKB
    acc = matrix_product(
        row_x, row_mask, codes, scales, zeros, columns, column_mask, K, first,
        tl.minimum(first + steps * BKB, KB), FORMAT, GROUP, BLOCK_N, E8M0, ASYMMETRIC, EVEN, BM,
        BN, BKB, SCALE_WEIGHT, PTX,
    )  # fmt: skip
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    size = M.to(tl.int64) * N
    mask = row_mask & column_mask[None, :]
    finish(y, partial, counters, acc, offsets, mask, size, tile, split, SPLIT)
