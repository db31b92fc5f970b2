"""From checkpoint order to the order that humming's kernels read, in plain torch.

The order is that of its `weight_repack_nk` and `transform_humming_weight_scale` (0.1.20) for bf16
activations. A tile of 64 outputs and 16 inputs holds, for each of 32 lanes, `bits` words. Lane
4 r + c has the codes with n mod 8 = r and k mod 8 = 2 c and 2 c + 1: those that a thread of
mma.m16n8k16 needs as its B operand. README.md draws the words.
"""

from __future__ import annotations

import torch

from kernels.humming.forms import BLOCK, Form, StoredMatrix
from kernels.quant_linear.matrix import Fp8BlockMatrix, Int4Matrix
from kernels.quant_linear.packing import check_e4m3
from kernels.quant_linear.reference import scale_values

# Legend: E experts, N outputs, K inputs, G groups of K.

LANES = 32
TILE_N, TILE_K = 64, 16
WORD_BYTES = 4
CHUNK_BYTES = 1 << 26  # of codes that are reordered at a time
NAN_E8M0 = 255


def repack(
    weight: StoredMatrix, form: Form
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, scales and zero points in humming's order; new memory, on the weight's device.

    Reads scales and codes back to check them. ValueError for NaN codes and scales, which the
    kernels would decode as numbers.
    """
    _check(weight)
    zero = weight.zero if isinstance(weight, Int4Matrix) else None
    return (
        codes_in_tiles(weight.codes, form.bits),
        _scales(weight, form),
        None if zero is None else zeros_in_tiles(zero),
    )


def _check(weight: StoredMatrix) -> None:
    if isinstance(weight, Fp8BlockMatrix):
        check_e4m3(weight.codes)
    if weight.scale.dtype == torch.uint8 and bool((weight.scale == NAN_E8M0).any()):
        raise ValueError("an e8m0 scale is NaN")


def codes_in_tiles(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., K / 16, N bits / 2] of bytes [..., N, K bits / 8], N of 64 and K of 16."""
    lead, rows = codes.shape[:-2], codes.shape[-2]
    inputs = codes.shape[-1] * 8 // bits
    assert codes.dtype == torch.uint8 and rows % TILE_N == 0 and inputs % TILE_K == 0
    stack = codes.reshape(-1, *codes.shape[-2:])
    shape = (stack.shape[0], inputs // TILE_K, rows * TILE_K * bits // 8)
    out = torch.empty(shape, dtype=torch.uint8, device=codes.device)
    step = max(1, CHUNK_BYTES // stack[0].numel())
    order = _four_bits if bits == 4 else _eight_bits
    for part, ready in zip(stack.split(step), out.split(step), strict=True):
        ready.copy_(order(part).reshape(ready.shape))
    return out.view(torch.int32).view(*lead, *shape[1:-1], shape[-1] // WORD_BYTES)


def _eight_bits(codes: torch.Tensor) -> torch.Tensor:
    """Word w of a lane has n = 8 w + r; its bytes are k = 2 c, 2 c + 8, 2 c + 1, 2 c + 9."""
    e, n, k = codes.shape
    tiles = codes.view(e, n // TILE_N, 8, 8, k // TILE_K, 2, 4, 2)  # e, tile, w, r, tile, 8, c, 1
    return tiles.permute(0, 4, 1, 3, 6, 2, 7, 5)


def _four_bits(codes: torch.Tensor) -> torch.Tensor:
    """Word w of a lane has n = 16 w + r and 16 w + r + 8.

    Its bytes are (k, n) = (2 c, n), (2 c, n + 8), (2 c + 1, n), (2 c + 1, n + 8), with k in the low
    half and k + 8 in the high one.
    """
    e, n, half = codes.shape
    # e, tile, w, n + 8, r, tile, k + 8, c: a byte has k = 2 c low and 2 c + 1 high
    tiles = codes.view(e, n // TILE_N, 4, 2, 8, half // 8, 2, 4)
    first, second = tiles.unbind(6)
    even = (first & 15) | (second << 4)
    odd = (first >> 4) | (second & 0xF0)
    return torch.stack((even, odd), -1).permute(0, 5, 1, 4, 6, 2, 7, 3)


def _scales(weight: StoredMatrix, form: Form) -> torch.Tensor:
    scale = weight.scale
    if form.block_n == BLOCK:
        return scale_values(scale).mT.contiguous()
    if isinstance(weight, Fp8BlockMatrix):
        scale = scale.repeat_interleave(weight.block_n, -2)
    ready = in_eights(scale)
    return ready if scale.dtype != torch.uint8 else ready.view(torch.float8_e8m0fnu)


def in_eights(scale: torch.Tensor) -> torch.Tensor:
    """[..., G, N] of [..., N, G]: of each 64 outputs n = 8 a + b goes to place 8 b + a."""
    lead, rows, groups = scale.shape[:-2], *scale.shape[-2:]
    eights = scale.mT.reshape(*lead, groups, rows // 64, 8, 8)
    return eights.mT.reshape(*lead, groups, rows)


def zeros_in_tiles(zero: torch.Tensor) -> torch.Tensor:
    """int32 [..., G, N / 8] of zero points uint8 [..., N, G]: ordered as scales, two a byte."""
    points = in_eights(zero)
    return (points[..., 0::2] | (points[..., 1::2] << 4)).contiguous().view(torch.int32)
