"""Root-mean-square normalisation."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.rms_norm import reference


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    group_size: int | None = None,
    zero_centred: bool = True,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * w over the last dimension, in fp32, cast once at the end.

    x [..., D] of any float type and weight [D]. With `group_size` G (a divisor of D) every G
    consecutive values have their own mean. `zero_centred` multiplies by 1 + w instead of w.
    Without `weight` nothing is multiplied (query heads of DeepSeek-V4).
    Returns [..., D] in `out_dtype`, or in the type of x. Source: Qwen3.5 and Qwen4-Exp RMSNorm.
    """
    assert weight is None or weight.shape == x.shape[-1:]
    assert group_size is None or x.shape[-1] % group_size == 0
    dtype = out_dtype or x.dtype
    if not backend.uses_triton(x):
        return reference.rms_norm(x, weight, eps, group_size, zero_centred).to(dtype)
    from kernels.rms_norm import launch

    return launch.rms_norm(x, weight, eps, group_size, zero_centred, dtype)


def rms_norm_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float, gate_type: str
) -> torch.Tensor:
    """Output norm of the gated delta net: x / sqrt(mean(x^2) + eps) * w * act(gate), in fp32.

    x and gate [..., V], weight [V] (plain, not 1 + w); act is SiLU for `gate_type` "silu" and the
    logistic function for "sigmoid". Returns [..., V] in the type of `gate`.
    """
    assert x.shape == gate.shape and x.shape[-1] == weight.shape[-1]
    assert gate_type in ("silu", "sigmoid")
    if not backend.uses_triton(x):
        return reference.rms_norm_gated(x, gate, weight, eps, gate_type).to(gate.dtype)
    from kernels.rms_norm import launch

    return launch.rms_norm_gated(x, gate, weight, eps, gate_type)
