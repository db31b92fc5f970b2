"""Weight codes and scales to numbers by bit operations, for Triton kernels.

Codes go to fp32 for the matrix-vector kernel, where the exponent bias stays in the value and the
scale takes it out again, and to bf16 for tensor cores: in pairs from words in "fragments" order
(*_pair), or four bytes at a time in the order of k (*_to_bf16, for cached rows). The bf16 decoders
have a form in PTX (PTX true) and one in plain operations, which the interpreter runs. NaN codes
are refused when weights load.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Codes of FORMAT, and of SCALE: how scales are stored.
FP8, INT4, MXFP4 = 0, 1, 2
FP8_: tl.constexpr = tl.constexpr(FP8)
INT4_: tl.constexpr = tl.constexpr(INT4)
MXFP4_: tl.constexpr = tl.constexpr(MXFP4)
FP32, BF16, FP16, E8M0 = 0, 1, 2, 3
FP32_: tl.constexpr = tl.constexpr(FP32)
BF16_: tl.constexpr = tl.constexpr(BF16)
E8M0_: tl.constexpr = tl.constexpr(E8M0)


@triton.jit
def e4m3_of_word(word, PLACE: tl.constexpr):
    """Byte PLACE, s eeee mmm, of an int32 word to e4m3 * 2^-120, by moving fields to fp32's."""
    return (((word << (24 - 8 * PLACE)) >> 4) & -0x78100000).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_of_word(word, PLACE: tl.constexpr):
    """Nibble PLACE, s ee m, of an int32 word to e2m1 * 2^-126."""
    return (((word << (28 - 4 * PLACE)) >> 6) & -0x7E400000).to(tl.float32, bitcast=True)


@triton.jit
def u4_of_word(word, PLACE: tl.constexpr):
    """Nibble PLACE, n, of an int32 word to n * 2^(4 (PLACE mod 6) - 149).

    fp32 bits below 2^24 count in units of 2^-149, so six nibbles need no shift.
    """
    if PLACE >= 6:
        word = word >> 24
    bits = word & (15 << (4 * (PLACE % 6)))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_to_bf16(code, PTX: tl.constexpr):
    """Byte (uint8) to its e4m3 value in bf16, exact."""
    if PTX:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 p, q, mask, sign, bias;
            mov.b32 mask, 0x07F007F0;
            mov.b32 sign, 0x80008000;
            mov.b32 bias, 0x7B807B80;
            prmt.b32 p, $2, 0, 0x1404;
            prmt.b32 q, $2, 0, 0x3424;
            shr.u32 $0, p, 4;
            shr.u32 $1, q, 4;
            and.b32 $0, $0, mask;
            and.b32 $1, $1, mask;
            lop3.b32 $0, $0, p, sign, 0xF8;
            lop3.b32 $1, $1, q, sign, 0xF8;
            fma.rn.bf16x2 $0, $0, bias, sign;
            fma.rn.bf16x2 $1, $1, bias, sign;
            }""",
            constraints="=&r,=&r,r",
            args=[code],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = code.to(tl.int32)
        return (e4m3_of_word(wide, 0) * 1.329227995784916e36).to(tl.bfloat16)


@triton.jit
def e2m1_to_bf16(code, scale, PTX: tl.constexpr):
    """Byte of two codes (uint8) to (low, high) as e2m1 * 2^-126 * scale in bf16.

    The scale is 2^126 times the true one, so the product is exact.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 p, q, t, mask, sign;
            mov.b32 mask, 0x01C001C0;
            mov.b32 sign, 0x80008000;
            prmt.b32 p, $4, 0, 0x1404;
            prmt.b32 q, $4, 0, 0x3424;
            shl.b32 t, p, 4;
            shr.u32 $0, p, 2;
            and.b32 $0, $0, mask;
            lop3.b32 $0, $0, t, sign, 0xF8;
            shl.b32 t, q, 4;
            shr.u32 $1, q, 2;
            and.b32 $1, $1, mask;
            lop3.b32 $1, $1, t, sign, 0xF8;
            shr.u32 $2, p, 6;
            and.b32 $2, $2, mask;
            lop3.b32 $2, $2, p, sign, 0xF8;
            shr.u32 $3, q, 6;
            and.b32 $3, $3, mask;
            lop3.b32 $3, $3, q, sign, 0xF8;
            fma.rn.bf16x2 $0, $0, $5, sign;
            fma.rn.bf16x2 $1, $1, $6, sign;
            fma.rn.bf16x2 $2, $2, $5, sign;
            fma.rn.bf16x2 $3, $3, $6, sign;
            }""",
            constraints="=&r,=&r,=&r,=&r,r,r,r",
            args=[code, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = code.to(tl.uint16)
        low = ((wide & 0x08) << 12) | ((wide & 0x07) << 6)
        high = ((wide & 0x80) << 8) | ((wide & 0x70) << 2)
        low = low.to(tl.bfloat16, bitcast=True) * scale
        return low, high.to(tl.bfloat16, bitcast=True) * scale


@triton.jit
def e4m3_pair(halves, scale, SLOT: tl.constexpr, PTX: tl.constexpr):
    """Byte SLOT of each half of a word, int16: e4m3 * 2^-120 * scale in bf16.

    Here and below each element depends on its own half and scale alone, so any two may share a
    register; the scale carries the inverse of the factor.
    """
    if PTX:
        LEFT: tl.constexpr = "8" if SLOT == 0 else "0"
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 p, q, zero;
            mov.b32 zero, 0x80008000;
            shl.b32 p, $1, """
            + LEFT
            + """;
            shr.u32 q, p, 4;
            and.b32 q, q, 0x07F007F0;
            lop3.b32 q, q, p, zero, 0xF8;
            fma.rn.bf16x2 $0, q, $2, zero;
            }""",
            constraints="=r,r,r",
            args=[halves, scale],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return _times(e4m3_of_word(_unsigned(halves) >> (8 * SLOT), 0), scale)


@triton.jit
def e2m1_pair(halves, scale, SLOT: tl.constexpr, PTX: tl.constexpr):
    """Nibble SLOT of each half, e2m1 * 2^-126 * scale in bf16; see e4m3_pair."""
    if PTX:
        LEFT: tl.constexpr = "12" if SLOT == 0 else ("8" if SLOT == 1 else "4")
        MOVE: tl.constexpr = "shl.b32 q, $1, " if SLOT < 2 else "shr.u32 q, $1, "
        BY: tl.constexpr = "2" if SLOT == 1 or SLOT == 2 else "6"
        SIGN: tl.constexpr = "mov.b32 p, $1" if SLOT == 3 else "shl.b32 p, $1, " + LEFT
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 p, q, zero;
            mov.b32 zero, 0x80008000;
            """
            + SIGN
            + """;
            """
            + MOVE
            + BY
            + """;
            and.b32 q, q, 0x01C001C0;
            lop3.b32 q, q, p, zero, 0xF8;
            fma.rn.bf16x2 $0, q, $2, zero;
            }""",
            constraints="=r,r,r",
            args=[halves, scale],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return _times(e2m1_of_word(_unsigned(halves), SLOT), scale)


@triton.jit
def u4_pair(halves, scale, offset, SLOT: tl.constexpr, PTX: tl.constexpr):
    """Nibble SLOT of each half, n * f * scale + offset in bf16; see e4m3_pair.

    bf16 bits below 2^8 count in units of 2^-133, so f is that, and 2^-129 for odd slots, which
    lie four bits higher.
    """
    if PTX:
        MOVE: tl.constexpr = "shr.u32 q, $1, 8" if SLOT >= 2 else "mov.b32 q, $1"
        MASK: tl.constexpr = "0x000F000F" if SLOT % 2 == 0 else "0x00F000F0"
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 q;
            """
            + MOVE
            + """;
            and.b32 q, q, """
            + MASK
            + """;
            fma.rn.bf16x2 $0, q, $2, $3;
            }""",
            constraints="=r,r,r,r",
            args=[halves, scale, offset],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        code = (_unsigned(halves) >> (4 * SLOT)) & 15
        # In two steps: fp32 holds 2^-133 as a subnormal.
        value = code.to(tl.float32) * (2.0 ** (4 * (SLOT % 2) - 100))
        value = value * (scale.to(tl.float32) * 2.0**-33)
        return (value + offset.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _unsigned(halves):
    return halves.to(tl.int32) & 0xFFFF


@triton.jit
def _times(value, scale):
    return (value * scale.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def times_bf16(pair, scale, PTX: tl.constexpr):
    """pair * scale in bf16, two at a time: the compiler would take bf16 products apart on sm80."""
    if PTX:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 zero;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, $1, $2, zero;
            }""",
            constraints="=r,r,r",
            args=[pair, scale],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return pair * scale


@triton.jit
def scale_word(scales, rows, entry, mask, SCALE: tl.constexpr):
    """The word of each row that holds scale `entry`: words load asynchronously."""
    if SCALE == FP32_:
        return tl.load(scales + rows + entry, mask=mask, other=0.0)
    else:
        return tl.load(scales + rows + entry // (4 if SCALE == E8M0_ else 2), mask=mask, other=0)


@triton.jit
def scale_of(word, entry, SHIFT: tl.constexpr, SCALE: tl.constexpr):
    """Scale `entry` of each row, fp32; of e8m0 codes up to 254 - SHIFT, 2^SHIFT times that."""
    if SCALE == FP32_:
        return word
    elif SCALE == E8M0_:
        code = (word >> (entry % 4 * 8)) & 0xFF
        return ((code + SHIFT) << 23).to(tl.float32, bitcast=True)
    else:
        bits = word >> (entry % 2 * 16)
        if SCALE == BF16_:
            return (bits << 16).to(tl.float32, bitcast=True)
        else:
            return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def zero_of(word, entry):
    """Zero point `entry` of each row, fp32, of a word of four."""
    return ((word >> (entry % 4 * 8)) & 0xFF).to(tl.float32)


@triton.jit
def _wide(column, BN: tl.constexpr, WIDTH: tl.constexpr):
    """bf16 [BN, WIDTH] of a value for each row."""
    return tl.broadcast_to(column.to(tl.bfloat16)[:, None], (BN, WIDTH))


@triton.jit
def decoded(
    halves, scale, zero, FORMAT: tl.constexpr, ASYMMETRIC: tl.constexpr, SLOT: tl.constexpr,
    SCALED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """bf16 [BN, WIDTH]: the weights of one slot of `halves`, times 2^-8 where they are INT4.

    scale fp32 [BN] (of e8m0 2^126 times that) counts where SCALED, zero fp32 [BN] where
    ASYMMETRIC. The symmetric zero point 8 is a power of two, so that its product with a scale is
    exact and one multiply-add applies both.
    """
    BN: tl.constexpr = halves.shape[0]
    WIDTH: tl.constexpr = halves.shape[1]
    if FORMAT == FP8_:
        factor = scale * 2.0**120 if SCALED else tl.full((BN,), 2.0**120, tl.float32)
        return e4m3_pair(halves, _wide(factor, BN, WIDTH), SLOT, PTX)
    elif FORMAT == MXFP4_:
        # A power of two: the upper half of its bits is the same in bf16.
        bits = (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        return e2m1_pair(halves, _wide(bits.to(tl.bfloat16, bitcast=True), BN, WIDTH), SLOT, PTX)
    else:
        FACTOR: tl.constexpr = 2.0 ** (125 - 4 * (SLOT % 2))
        one = tl.full((BN,), 1.0, tl.float32)
        if SCALED and not ASYMMETRIC:
            one = scale.to(tl.bfloat16).to(tl.float32)
            zero = one * 8.0
        elif not ASYMMETRIC:
            zero = one * 8.0
        factor = _wide(one * FACTOR, BN, WIDTH)
        w = u4_pair(halves, factor, _wide(zero * -(2.0**-8), BN, WIDTH), SLOT, PTX)
        if SCALED and ASYMMETRIC:
            w = times_bf16(w, _wide(scale, BN, WIDTH), PTX)
        return w
