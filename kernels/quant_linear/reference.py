from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kernels.humming.matrix import HummingMatrix
from kernels.quant_linear.matrix import (
    Fp8BlockMatrix,
    Int4Matrix,
    Matrix,
    Mxfp4Matrix,
    Order,
    PlainMatrix,
)

# A matrix product may round differently for another number of rows, so all run with this many.
ROW_TILE = 8
# Output columns that are widened at a time: bounds the memory of a large head.
COLUMN_TILE = 8192
# e2m1 magnitudes by code; bit 3 is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _pairs(values: Sequence[float]) -> torch.Tensor:
    """fp32 [256, 2]: the values of the low and of the high half of every byte."""
    table = torch.tensor(values)
    return torch.stack((table.repeat(16), table.repeat_interleave(16)), -1)


E2M1_PAIRS = _pairs((*E2M1, *(-value for value in E2M1)))
U4_PAIRS = _pairs([float(value) for value in range(16)])


def linear(x_TK: torch.Tensor, weight: Matrix) -> torch.Tensor:
    rows = x_TK.shape[0]
    x = _whole_tiles(x_TK.float())
    step = _column_step(weight)
    columns = [
        _tiled_product(x, dequantize(_columns(weight, first, first + step)).t())
        for first in range(0, weight.out_features, step)
    ]
    y = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
    return y[:rows]


def _column_step(weight: Matrix) -> int:
    """Output columns at a time, whole blocks of the format."""
    block = weight.block_n if isinstance(weight, Fp8BlockMatrix) else 1
    return max(COLUMN_TILE // block, 1) * block


def _whole_tiles(x_TK: torch.Tensor) -> torch.Tensor:
    missing = -x_TK.shape[0] % ROW_TILE
    return torch.cat([x_TK, x_TK.new_zeros(missing, x_TK.shape[1])]) if missing else x_TK


def _tiled_product(x_TK: torch.Tensor, w_KN: torch.Tensor) -> torch.Tensor:
    rows = x_TK.shape[0]
    if rows == ROW_TILE:
        return torch.mm(x_TK, w_KN)
    y = x_TK.new_empty(rows, w_KN.shape[1])
    for row in range(0, rows, ROW_TILE):
        torch.mm(x_TK[row : row + ROW_TILE], w_KN, out=y[row : row + ROW_TILE])
    return y


def dequantize(weight: Matrix) -> torch.Tensor:
    match weight:
        case PlainMatrix(data):
            return data.float()
        case Fp8BlockMatrix(codes, scale, block_n, block_k):
            rows = _fp8_rows(codes, weight.in_features) if weight.order == "fragments" else codes
            return dequantize_fp8_blocks(rows, scale_values(scale), block_n, block_k)
        case Int4Matrix(codes, scale, zero, group, order):
            groups = weight.in_features // group
            values = _in_groups(four_bit_values(codes, order, U4_PAIRS), groups, group)
            offset = 8.0 if zero is None else zero[..., :groups].float().unsqueeze(-1)
            return values.sub_(offset).mul_(scale[..., :groups].float().unsqueeze(-1)).flatten(-2)
        case Mxfp4Matrix(codes, scale, order):
            groups = weight.in_features // weight.group
            values = _in_groups(four_bit_values(codes, order, E2M1_PAIRS), groups, weight.group)
            return values.mul_(scale_values(scale[..., :groups]).unsqueeze(-1)).flatten(-2)
        case HummingMatrix():
            raise TypeError("a matrix in humming's order is not read back")


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """fp32 scales; uint8 holds e8m0 codes, 2^(code - 127) with 255 for NaN."""
    if scale.dtype != torch.uint8:
        return scale.float()
    bits = scale.to(torch.int32).bitwise_left_shift_(23)
    bits.masked_fill_(scale == 0, 1 << 22)  # 2^-127 is subnormal in fp32
    bits.masked_fill_(scale == 255, 0x7FC00000)
    return bits.view(torch.float32)


def four_bit_values(codes: torch.Tensor, order: Order, pairs_256x2: torch.Tensor) -> torch.Tensor:
    """fp32 [..., N, K] in the order of k, of bytes [..., N, K / 2]; a pair of values for a byte."""
    pairs = pairs_256x2.to(codes.device).index_select(0, codes.flatten().int())
    if order == "fragments":  # blocks of 16 words w with nibbles s; k = 16 s + w
        pairs = pairs.view(-1, 16, 8).transpose(1, 2).contiguous()
    return pairs.view(*codes.shape[:-1], 2 * codes.shape[-1])


def _in_groups(values: torch.Tensor, groups: int, group: int) -> torch.Tensor:
    """[..., N, groups, group], without the columns that pad rows."""
    return values[..., : groups * group].reshape(*values.shape[:-1], groups, group)


def _fp8_rows(codes: torch.Tensor, inputs: int) -> torch.Tensor:
    """Codes [..., N, K] in the order of k, of rows in "fragments" order."""
    blocks = codes.view(-1, 16, 4).transpose(1, 2)  # of words w with bytes s; k = 16 s + w
    return blocks.reshape(codes.shape)[..., :inputs]


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of e2m1 codes 0..15 (uint8): s ee m."""
    return E2M1_PAIRS[:16, 0].to(codes.device)[codes.long()]


def nibbles(codes: torch.Tensor, order: Order) -> torch.Tensor:
    """Four-bit codes uint8 [..., N, K] in the order of k, of bytes [..., N, K / 2]."""
    return four_bit_values(codes, order, U4_PAIRS).to(torch.uint8)


def dequantize_fp8_blocks(
    codes: torch.Tensor, scale: torch.Tensor, block_n: int, block_k: int
) -> torch.Tensor:
    """code * scale in fp32. The factor 2^8 that the decoder leaves out is exact in the scale."""
    values = _e4m3_over_256(codes)
    factor = scale.float() * 256.0
    n, k = values.shape[-2:]
    if n <= block_n and k <= block_k:
        return values.mul_(factor)
    factor = factor.repeat_interleave(block_n, -2).repeat_interleave(block_k, -1)
    return values.mul_(factor[..., :n, :k])


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of e4m3 codes (uint8), exact for the 254 finite codes."""
    return _e4m3_over_256(codes).mul_(256.0)


def _e4m3_over_256(codes: torch.Tensor) -> torch.Tensor:
    """Exponent and mantissa moved into the fp16 fields: a value 2^8 too small, never inexact."""
    wide = codes.view(torch.int8).to(torch.int16)
    return wide.bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16).float()


def _columns(weight: Matrix, first: int, stop: int) -> Matrix:
    if weight.out_features <= stop - first:
        return weight
    match weight:
        case PlainMatrix(data):
            return PlainMatrix(data[first:stop])
        case Fp8BlockMatrix(codes, scale, block_n):
            assert first % block_n == 0
            blocks = scale[first // block_n : -(-stop // block_n)]
            return replace(weight, codes=codes[first:stop], scale=blocks)
        case Int4Matrix(codes, scale, zero):
            part = None if zero is None else zero[first:stop]
            return replace(weight, codes=codes[first:stop], scale=scale[first:stop], zero=part)
        case Mxfp4Matrix(codes, scale):
            return replace(weight, codes=codes[first:stop], scale=scale[first:stop])
        case HummingMatrix():
            raise TypeError("a matrix in humming's order is not read back")
