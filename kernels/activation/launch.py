"""Launches of the Triton kernels: one for a call. None synchronises with the host."""

from __future__ import annotations

import torch

from kernels.activation.triton import SIGMOID, SILU, SOFTPLUS
from kernels.activation.triton import pointwise as pointwise_kernel
from kernels.activation.triton import silu_and_mul as silu_and_mul_kernel

# Legend: T rows, W values of a row.

KINDS = {"sigmoid": SIGMOID.value, "silu": SILU.value, "softplus": SOFTPLUS.value}
BLOCK, WARPS = 1024, 4


def pointwise(x: torch.Tensor, kind: str) -> torch.Tensor:
    """fp32 of the shape of x, contiguous."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    count = x.numel()
    if count:
        grid = (-(-count // BLOCK),)
        pointwise_kernel[grid](x, out, count, KIND=KINDS[kind], BLOCK=BLOCK, num_warps=WARPS)
    return out


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """In the type of `gate`, contiguous. Rows may lie apart, as halves of a wider matrix do."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    gate_TW, up_TW = _rows(gate), _rows(up)
    tokens, width = gate_TW.shape
    silu_and_mul_kernel[(tokens, -(-width // BLOCK))](
        gate_TW, up_TW, out, gate_TW.stride(0), up_TW.stride(0), width, limit or 0.0,
        LIMITED=limit is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [T, W] with values of a row side by side; copied only where it must be."""
    x = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    return x if x.stride(1) == 1 else x.contiguous()
