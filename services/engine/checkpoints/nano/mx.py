"""Quantisers of DeepSeek's stored formats: FP8 blocks and MXFP4, both with ue8m0 scales."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_GROUP = 32
ROW_GROUP = 32
_BIAS = 127


def quantize_fp8(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes [N, K] and ue8m0 scales [ceil(N / block), ceil(K / block)] of fp32 [N, K]."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -k % block, 0, -n % block))
    blocks = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))  # [n, block, k, block]
    power, scale = _power_of_two(blocks.abs().amax((1, 3)) / E4M3_MAX)
    codes = (blocks / power[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.flatten(2).flatten(0, 1)[:n, :k].contiguous(), scale


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two e2m1 codes a byte, int8 [N, K / 2], and ue8m0 scales [N, K / 32] of fp32 [N, K].

    The even input is in the low half of a byte. K must be a multiple of 32.
    """
    groups = weight.unflatten(1, (-1, MXFP4_GROUP))
    power, scale = _power_of_two(groups.abs().amax(2) / E2M1_MAX)
    scaled = (groups / power[..., None]).flatten(1)
    distance = (scaled.abs()[..., None] - torch.tensor(E2M1_VALUES)).abs()
    codes = distance.argmin(-1).to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8), scale


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [N, K] and ue8m0 scales [N, K / 32] of fp32 [N, K], K a multiple of 32."""
    groups = values.unflatten(1, (-1, ROW_GROUP))
    power, scale = _power_of_two(groups.abs().amax(2) / E4M3_MAX)
    return (groups / power[..., None]).flatten(1).to(torch.float8_e4m3fn), scale


def _power_of_two(least: Tensor) -> tuple[Tensor, Tensor]:
    """The least power of two that is no smaller, and its ue8m0 code."""
    mantissa, exponent = torch.frexp(least.clamp_min(2.0**-120))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    power = torch.ldexp(torch.ones_like(least), exponent)
    return power, (exponent + _BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)
