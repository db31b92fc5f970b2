"""From checkpoint tensors to matrices, and from matrices to the order that the kernels read."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

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

FourBit = TypeVar("FourBit", Int4Matrix, Mxfp4Matrix)


def from_compressed_tensors(
    packed: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, group: int
) -> Int4Matrix:
    """An INT4 matrix of the "pack-quantized" format of compressed-tensors.

    packed int32 [..., N, K / 8], code k in bits 4 (k mod 8) of word k / 8; scale
    [..., N, K / group]; zero_point int32 [..., ceil(N / 8), K / group], row n in bits 4 (n mod 8)
    of word n / 8, or None.
    """
    codes = packed.contiguous().view(torch.uint8)
    if zero_point is None:
        return Int4Matrix(codes, scale, None, group)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    rows = (zero_point.unsqueeze(-2) >> shifts.unsqueeze(-1)) & 15
    zero = rows.flatten(-3, -2)[..., : packed.shape[-2], :].to(torch.uint8)
    return Int4Matrix(codes, scale, zero.contiguous(), group)


def prepare(weight: Matrix) -> Matrix:
    """The same matrix in the order that the GPU kernels read; called once, when weights load.

    Four-bit codes go to "halves" order; fp8 and plain matrices stay as they are. Reads scales
    and codes back to check them, so it must not run inside a step.
    Raises ValueError for codes that the kernels would decode wrongly: e4m3 NaN, e8m0 above 2^1.
    """
    match weight:
        case PlainMatrix():
            return weight
        case Fp8BlockMatrix(codes, scale):
            if bool(((codes & 0x7F) == 0x7F).any()):
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
    units = weight.codes.view(*weight.codes.shape[:-1], -1, NIBBLE_UNIT // 2)
    # Byte j of a unit holds k = 2 j and 2 j + 1: the first half of the bytes holds k = 0..15.
    first, second = units[..., : NIBBLE_UNIT // 4], units[..., NIBBLE_UNIT // 4 :]
    even = (first & 15) | ((second & 15) << 4)
    odd = (first >> 4) | (second & 0xF0)
    codes = torch.stack((even, odd), -1).flatten(-3)
    return replace(weight, codes=codes.contiguous(), order="halves")
