"""Linear layers over weights in their stored form."""

from __future__ import annotations

import torch

from kernels.quant_linear import reference
from kernels.quant_linear.matrix import Fp8BlockMatrix, Matrix, PlainMatrix

__all__ = ["Fp8BlockMatrix", "Matrix", "PlainMatrix", "decode_e4m3", "dequantize", "linear"]


def linear(
    x_TK: torch.Tensor, weight: Matrix, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x @ W^T with fp32 accumulation: [T, K] times [N, K] gives [T, N].

    Returned in `out_dtype`, or in the type of x. A row of the result depends on its row of x
    alone, bit for bit.
    """
    assert x_TK.dim() == 2 and x_TK.shape[1] == weight.in_features
    return reference.linear(x_TK, weight).to(out_dtype or x_TK.dtype)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of e4m3 codes (uint8), any shape; exact for the 254 finite codes."""
    assert codes.dtype == torch.uint8
    return reference.decode_e4m3(codes)


def dequantize(weight: Matrix) -> torch.Tensor:
    """The matrix [N, K] (or a stack [E, N, K]) in fp32, exactly as its format defines it."""
    return reference.dequantize(weight)
