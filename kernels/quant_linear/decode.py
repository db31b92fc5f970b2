"""Weight codes to numbers by bit operations, for Triton kernels.

Two kinds: to fp32 for the matrix-vector kernel, where the exponent bias stays in the value and
the scale takes it out again, and to bf16 for tensor cores, exact. The bf16 decoders have a form
in PTX that takes four codes in a register at once (PTX true) and one in plain operations, which
the interpreter runs. NaN codes are refused when weights load.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def u4_to_bf16(code, offset, PTX: tl.constexpr):
    """Byte of two codes n (uint8) to (low, high) as 128 + n + offset in bf16, exact.

    offset is -(128 + zero) in bf16.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 p, q, mask, base, one;
            mov.b32 mask, 0x000F000F;
            mov.b32 base, 0x43004300;
            mov.b32 one, 0x3F803F80;
            prmt.b32 p, $4, 0, 0x4140;
            prmt.b32 q, $4, 0, 0x4342;
            lop3.b32 $0, p, mask, base, 0xEA;
            lop3.b32 $1, q, mask, base, 0xEA;
            shr.u32 p, p, 4;
            shr.u32 q, q, 4;
            lop3.b32 $2, p, mask, base, 0xEA;
            lop3.b32 $3, q, mask, base, 0xEA;
            fma.rn.bf16x2 $0, $0, one, $5;
            fma.rn.bf16x2 $1, $1, one, $6;
            fma.rn.bf16x2 $2, $2, one, $5;
            fma.rn.bf16x2 $3, $3, one, $6;
            }""",
            constraints="=&r,=&r,=&r,=&r,r,r,r",
            args=[code, offset],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = code.to(tl.int32)
        zero = offset.to(tl.float32) + 128.0
        low = ((wide & 15).to(tl.float32) + zero).to(tl.bfloat16)
        return low, ((wide >> 4).to(tl.float32) + zero).to(tl.bfloat16)


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
