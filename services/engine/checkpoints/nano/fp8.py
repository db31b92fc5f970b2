"""FP8 e4m3 storage of the experts (128x128 blocks) and of the n-gram table (one scale)."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0


def _scale(peak: Tensor) -> Tensor:
    """Return the BF16 scale for the greatest magnitude `peak`, in fp32."""
    return (peak.clamp_min(1e-8) / E4M3_MAX).to(torch.bfloat16).float()


def _encode(values: Tensor) -> Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes [..., N, K] and fp32 values of the BF16 scales [..., N/128, K/128].

    N and K must be multiples of 128; a weight is code * scale.
    """
    rows, columns = weight.shape[-2] // BLOCK, weight.shape[-1] // BLOCK
    blocks = weight.float().unflatten(-1, (columns, BLOCK)).unflatten(-3, (rows, BLOCK))
    scale = _scale(blocks.abs().amax(dim=(-3, -1)))
    codes = _encode(blocks / scale[..., :, None, :, None])
    return codes.flatten(-2).flatten(-3, -2), scale


def dequantize_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the fp32 weight of e4m3 codes [..., N, K] and block scales."""
    wide = scale.float().repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return codes.float() * wide[..., : codes.shape[-2], : codes.shape[-1]]


def quantize_table(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes and the single scale (fp32 value of a BF16 number)."""
    scale = _scale(table.float().abs().amax())
    return _encode(table.float() / scale), scale


def through_blocks(weight: Tensor) -> Tensor:
    """Return the weight as it will be read back, passing gradients straight through."""
    with torch.no_grad():
        codes, scale = quantize_blocks(weight)
        change = dequantize_blocks(codes, scale) - weight
    return weight + change


def through_table(table: Tensor) -> Tensor:
    """Return the table as it will be read back, passing gradients straight through."""
    with torch.no_grad():
        codes, scale = quantize_table(table)
        change = codes.float() * scale - table
    return table + change
