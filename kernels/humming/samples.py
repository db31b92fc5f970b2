"""Random weights of every form, for tests, tuning and the benchmark."""

from __future__ import annotations

import torch

from kernels.humming.forms import FORMS, StoredMatrix
from kernels.quant_linear.matrix import Fp8BlockMatrix, Int4Matrix, Mxfp4Matrix


def random_weights(form: str, n: int, k: int, experts: int, device: str) -> StoredMatrix:
    """In checkpoint order, [n, k] or a stack of `experts`; scales within a factor of 64."""
    lead = (experts,) if experts else ()
    group = FORMS[form].group
    if form.startswith("fp8"):
        codes = _bytes(*lead, n, k, device=device).bitwise_and_(0xBF)  # magnitudes below 2
        if form == "fp8-b128":
            scale = torch.rand(*lead, n // 128, k // 128, device=device) * 0.02 + 0.01
            return Fp8BlockMatrix(codes, scale)
        scale = _bytes(*lead, n // 32, k // 32, low=117, high=123, device=device)
        return Fp8BlockMatrix(codes, scale, 32, 32)
    codes = _bytes(*lead, n, k // 2, device=device)
    if form == "mxfp4":
        return Mxfp4Matrix(codes, _bytes(*lead, n, k // 32, low=117, high=123, device=device))
    scale = (torch.rand(*lead, n, k // group, device=device) * 0.004 + 0.001).bfloat16()
    zero = None
    if FORMS[form].zero:
        zero = _bytes(*scale.shape, high=16, device=device)
    return Int4Matrix(codes, scale, zero, group)


def _bytes(*shape: int, low: int = 0, high: int = 256, device: str) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device=device)
