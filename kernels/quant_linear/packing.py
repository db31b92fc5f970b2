"""From checkpoint tensors to matrices, and from matrices to the order that the kernels read."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from kernels.humming.matrix import HummingMatrix
from kernels.quant_linear.matrix import (
    NIBBLE_UNIT,
    Fp8BlockMatrix,
    Int4Matrix,
    Matrix,
    Mxfp4Matrix,
    PlainMatrix,
)

# The largest e8m0 code that the kernels take: they fold 2^126 into the scale, in bf16.
MAX_E8M0 = 128
WORD_BYTES = 4
CHUNK_BYTES = 1 << 26  # whole units
LOW_NIBBLES = 0x0F0F0F0F
# The nibble of a word that holds each of eight columns, in AutoAWQ.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)

FourBit = TypeVar("FourBit", Int4Matrix, Mxfp4Matrix)


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

    Four-bit codes go to "halves" order in new memory of the same size; fp8 and plain matrices stay
    as they are. Reads scales and codes back to check them, so it must not run inside a step.
    Raises ValueError for codes that the kernels would decode wrongly: e4m3 NaN, e8m0 above 2^1.
    """
    match weight:
        case PlainMatrix() | HummingMatrix():
            return weight
        case Fp8BlockMatrix(codes, scale):
            if any(bool(((part & 0x7F) == 0x7F).any()) for part in _chunks(codes)):
                raise ValueError("an e4m3 code is NaN")
            _check_e8m0(scale, 254)
            return weight
        case Int4Matrix():
            return _in_halves(weight)
        case Mxfp4Matrix(_, scale):
            _check_e8m0(scale, MAX_E8M0)
            return _in_halves(weight)


def _check_e8m0(scale: torch.Tensor, largest: int) -> None:
    if scale.dtype == torch.uint8 and int(scale.max()) > largest:
        raise ValueError(f"an e8m0 scale code is {int(scale.max())}, more than {largest}")


def _in_halves(weight: FourBit) -> FourBit:
    if weight.order == "halves":
        return weight
    codes = torch.empty_like(weight.codes)
    for part, ready in zip(_chunks(weight.codes), _chunks(codes), strict=True):
        units = part.view(-1, NIBBLE_UNIT // 2)
        # Byte j of a unit holds k = 2 j and 2 j + 1: the first half of the bytes holds k = 0..15.
        first, second = units[:, : NIBBLE_UNIT // 4], units[:, NIBBLE_UNIT // 4 :]
        even = (first & 15) | ((second & 15) << 4)
        odd = (first >> 4) | (second & 0xF0)
        torch.stack((even, odd), -1, out=ready.view(-1, NIBBLE_UNIT // 4, 2))
    return replace(weight, codes=codes, order="halves")


def _chunks(codes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of contiguous bytes, small enough that work on one needs little memory."""
    return torch.split(codes.contiguous().view(-1), CHUNK_BYTES)
