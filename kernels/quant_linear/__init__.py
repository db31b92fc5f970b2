"""Linear layers over weights in their stored form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels import backend
from kernels.humming.matrix import HummingMatrix
from kernels.quant_linear import packing, reference
from kernels.quant_linear.matrix import (
    Fp8BlockMatrix,
    Int4Matrix,
    Matrix,
    Mxfp4Matrix,
    PlainMatrix,
)
from kernels.quant_linear.packing import (
    from_auto_awq,
    from_compressed_tensors,
    zeros_of_compressed_tensors,
)

if TYPE_CHECKING:
    from kernels.humming.select import BackEnd
    from kernels.quant_linear.launch import Workspace

__all__ = [
    "Fp8BlockMatrix",
    "HummingMatrix",
    "Int4Matrix",
    "Matrix",
    "Mxfp4Matrix",
    "PlainMatrix",
    "decode_e4m3",
    "dequantize",
    "from_auto_awq",
    "from_compressed_tensors",
    "linear",
    "prepare",
    "scale_values",
    "zeros_of_compressed_tensors",
]


def linear(
    x_TK: torch.Tensor,
    weight: Matrix,
    out_dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """x @ W^T with fp32 accumulation: [T, K] times [N, K] gives [T, N].

    Returned in `out_dtype`, or in the type of x, or written to `out` [T, N]. On the CPU a row of
    the result depends on its row of x alone, bit for bit. On a GPU quantised weights must come
    from `prepare`; the result depends on the rows and on their number, whose range picks the
    kernel, and equal calls give equal bits. `workspace` (see launch.Workspace) is used where K is
    split; without it a split product allocates.
    """
    assert x_TK.dim() == 2 and x_TK.shape[1] == weight.in_features
    if not backend.uses_triton(x_TK):
        y = reference.linear(x_TK, weight).to(out_dtype or x_TK.dtype)
        return y if out is None else out.copy_(y)
    if out is None:
        shape = (x_TK.shape[0], weight.out_features)
        out = torch.empty(shape, dtype=out_dtype or x_TK.dtype, device=x_TK.device)
    if isinstance(weight, PlainMatrix):
        return _plain(x_TK, weight, out)
    if isinstance(weight, HummingMatrix):
        from kernels.humming.launch import quant_linear

        return quant_linear(x_TK.contiguous(), weight, out)
    from kernels.quant_linear import launch

    return launch.quant_linear(x_TK.contiguous(), weight, out, workspace)


def prepare(weight: Matrix, back_end: BackEnd | None = None) -> Matrix:
    """The same matrix as its GPU kernels read it; called once, when weights load.

    On a card, humming's kernels where they are faster for the size, installed and built for the
    shape, else Triton's; `back_end` "humming" or "triton" (or WARHORSE_GEMM) asks for one, see
    kernels/humming/select.py.
    For Triton see `packing.prepare`. ValueError for codes that the kernels would decode wrongly.
    """
    if not isinstance(weight, PlainMatrix | HummingMatrix):
        from kernels.humming import select

        if (matrix := select.prepared(weight, back_end)) is not None:
            return matrix
    return packing.prepare(weight)


def _plain(x_TK: torch.Tensor, weight: PlainMatrix, out_TN: torch.Tensor) -> torch.Tensor:
    """By the vendor's library, in the type of the weight."""
    data = weight.data
    x = x_TK.to(data.dtype)
    if out_TN.dtype == data.dtype:
        return torch.mm(x, data.t(), out=out_TN)
    if data.dtype == torch.float32:
        return out_TN.copy_(torch.mm(x, data.t()))
    return out_TN.copy_(torch.mm(x, data.t(), out_dtype=torch.float32))


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of e4m3 codes (uint8), any shape; exact for the 254 finite codes."""
    assert codes.dtype == torch.uint8
    return reference.decode_e4m3(codes)


def dequantize(weight: Matrix) -> torch.Tensor:
    """The matrix [N, K] (or a stack [E, N, K]) in fp32, exactly as its format defines it."""
    return reference.dequantize(weight)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """fp32 values of scales: floats as they are, uint8 as e8m0 codes (255 is NaN)."""
    return reference.scale_values(scale)
