"""From checkpoint tensors to matrices, and from matrices to the order that the kernels read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kernels.humming.matrix import HummingMatrix
from kernels.quant_linear.matrix import (
    BLOCK_BYTES,
    SCALES_PADDED,
    Fp8BlockMatrix,
    Int4Matrix,
    Matrix,
    Mxfp4Matrix,
    PlainMatrix,
)
from kernels.quant_linear.reference import scale_values

# The kernels fold powers of two into scales in bf16: 2^126, 2^120 and 2^125.
MAX_E8M0 = 128
NAN_E4M3 = 0x7F
MAX_FP8_SCALE, MAX_INT4_SCALE = 2.0**7, 2.0**2
WORD_BYTES = 4
CHUNK_BYTES = 1 << 26  # whole blocks
LOW_NIBBLES = 0x0F0F0F0F
# The nibble of a word that holds each of eight columns, in AutoAWQ.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def from_compressed_tensors(
    packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: int
) -> Int4Matrix:
    """An INT4 matrix of the "pack-quantized" format of compressed-tensors.

    packed int32 [..., N, K / 8], code k in bits 4 (k mod 8) of word k / 8; scale and zero (see
    `zeros_of_compressed_tensors`) [..., N, K / group]. The codes are the same bytes.
    """
    return Int4Matrix(packed.contiguous().view(torch.uint8), scale, zero, group)


def zeros_of_compressed_tensors(zero_point: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero points uint8 [..., N, G] of int32 [..., ceil(N / 8), G].

    Row n lies in bits 4 (n mod 8) of word n / 8.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=zero_point.device)
    codes = (zero_point.unsqueeze(-2) >> shifts.unsqueeze(-1)) & 15
    return codes.flatten(-3, -2)[..., :rows, :].to(torch.uint8)


def from_auto_awq(
    qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor | None, group: int
) -> Int4Matrix:
    """An INT4 matrix of AutoAWQ's "gemm" format: transposed, else the same codes and scales.

    qweight int32 [K, N / 8], scales [K / group, N], qzeros int32 [K / group, N / 8] or None where
    zero points are 8 throughout. Nibble i of a word holds column (0, 2, 4, 6, 1, 3, 5, 7)[i] of
    eight. Source: awq.utils.packing_utils.
    """
    zero = None if qzeros is None else _awq_columns(qzeros).t().contiguous()
    return Int4Matrix(_awq_transposed(qweight), scales.t().contiguous(), zero, group)


def _awq_transposed(words: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [N, K / 2] in pairs along K, of int32 [K, N / 8]: whole words at a time."""
    inputs, eighths = words.shape
    pairs = words.t().contiguous().view(eighths, inputs // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    low = (even & LOW_NIBBLES) | ((odd & LOW_NIBBLES) << 4)
    high = ((even >> 4) & LOW_NIBBLES) | (odd & ~LOW_NIBBLES)
    codes = torch.empty(eighths, 8, inputs // 2, dtype=torch.uint8, device=words.device)
    for column, nibble in enumerate(AWQ_NIBBLES):
        bytes_of_words = (high if nibble % 2 else low).view(torch.uint8)
        codes[:, column] = bytes_of_words.view(eighths, -1, WORD_BYTES)[..., nibble // 2]
    return codes.view(8 * eighths, -1)


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    """uint8 [R, N] of int32 [R, N / 8]."""
    stored = words.contiguous().view(torch.uint8).view(words.shape[0], -1, WORD_BYTES)
    nibbles = torch.stack((stored & 15, stored >> 4), -1).flatten(-2)
    return nibbles[..., list(AWQ_NIBBLES)].flatten(-2)


def prepare(weight: Matrix) -> Matrix:
    """The same matrix in the order that the GPU kernels read; called once, when weights load.

    Codes go to "fragments" order in new memory, with rows padded to whole blocks and words of
    scales; scales of fp8 go to fp32. Plain matrices stay as they are. Reads scales and codes back
    to check them, so it must not run inside a step. Raises ValueError for what the kernels would
    decode wrongly: an e4m3 NaN, an e8m0 scale above 2^1 of MXFP4, an fp8 or INT4 scale too large.
    """
    match weight:
        case PlainMatrix() | HummingMatrix():
            return weight
        case Fp8BlockMatrix() | Int4Matrix() | Mxfp4Matrix() if weight.order == "fragments":
            return weight
        case Fp8BlockMatrix(codes, scale):
            check_e4m3(codes)
            scale = scale_values(scale).contiguous()
            _check_scale(scale, MAX_FP8_SCALE)
            codes, inputs = _in_fragments(codes, _fp8_words), weight.in_features
            return replace(weight, codes=codes, scale=scale, order="fragments", inputs=inputs)
        case Int4Matrix(codes, scale, zero):
            _check_scale(scale, MAX_INT4_SCALE)
            codes, inputs = _in_fragments(codes, _four_bit_words), weight.in_features
            zero = None if zero is None else _padded(zero, SCALES_PADDED)
            scale = _padded(scale, SCALES_PADDED)
            return Int4Matrix(codes, scale, zero, weight.group, "fragments", inputs)
        case Mxfp4Matrix(codes, scale):
            if int(scale.max()) > MAX_E8M0:
                raise ValueError(f"an e8m0 scale code is {int(scale.max())}, more than {MAX_E8M0}")
            codes, inputs = _in_fragments(codes, _four_bit_words), weight.in_features
            return Mxfp4Matrix(codes, _padded(scale, SCALES_PADDED), "fragments", inputs)


def check_e4m3(codes: torch.Tensor) -> None:
    """ValueError for a NaN among e4m3 codes uint8, which kernels would decode as a number."""
    if any(bool(((part & NAN_E4M3) == NAN_E4M3).any()) for part in _chunks(codes)):
        raise ValueError("an e4m3 code is NaN")


def _check_scale(scale: torch.Tensor, limit: float) -> None:
    if not bool((scale.abs() < limit).all()):
        raise ValueError(f"a scale is {float(scale.abs().max())}, not below {limit}")


def _padded(rows: torch.Tensor, unit: int) -> torch.Tensor:
    """With zeros to a multiple of `unit` columns, contiguous."""
    missing = -rows.shape[-1] % unit
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows.contiguous()


def _in_fragments(
    codes: torch.Tensor, words: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`words` of runs of whole blocks of the codes, rows padded to whole blocks."""
    padded = _padded(codes, BLOCK_BYTES)
    ready = torch.empty_like(padded)
    for part, out in zip(_chunks(padded), _chunks(ready), strict=True):
        out.view(-1, BLOCK_BYTES).copy_(words(part.view(-1, BLOCK_BYTES)))
    return ready


def _fp8_words(blocks: torch.Tensor) -> torch.Tensor:
    """Bytes [B, 64] in the order of k = 16 s + w, to words w of bytes s."""
    return blocks.view(-1, 4, 16).transpose(1, 2).reshape(-1, BLOCK_BYTES)


def _four_bit_words(blocks: torch.Tensor) -> torch.Tensor:
    """Bytes [B, 64], two codes of k = 16 s + w each in turn, to words w of nibbles s."""
    pairs = blocks.view(-1, 4, 2, 8)  # [B, s / 2, s mod 2, w / 2], even w in the low nibbles
    first, last = pairs[:, :, 0], pairs[:, :, 1]
    even = (first & 15) | (last << 4)
    odd = (first >> 4) | (last & 0xF0)
    words = torch.stack((even, odd), -1)  # [B, s / 2, w / 2, w mod 2]
    return words.view(-1, 4, 16).transpose(1, 2).reshape(-1, BLOCK_BYTES)


def _chunks(codes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of contiguous bytes, small enough that work on one needs little memory."""
    return torch.split(codes.contiguous().view(-1), CHUNK_BYTES)
