"""Launches of the Triton kernel: one for a call. None synchronises with the host."""

from __future__ import annotations

import torch

from kernels.rms_norm.triton import NO_GATE, SIGMOID_GATE, SILU_GATE
from kernels.rms_norm.triton import rms_norm as kernel

# Legend: A x B rows of G values.

ELEMENTS = 1024  # of a program of short rows
THREAD_ELEMENTS = 16
WIDEST = 16384
GATES = {"silu": SILU_GATE.value, "sigmoid": SIGMOID_GATE.value}


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    group_size: int | None,
    zero_centred: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See the package. Rows of x may lie apart, as slices of wider ones do."""
    x_ABG = _rows(x, group_size)
    flags = {"ZERO_CENTRED": zero_centred, "GROUPED": group_size is not None, "GATE": NO_GATE.value}
    return _launch(x_ABG, weight, x_ABG, x.shape, out_dtype, eps, flags)


def rms_norm_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gate_type: str
) -> torch.Tensor:
    """See the package."""
    flags = {"ZERO_CENTRED": False, "GROUPED": False, "GATE": GATES[gate_type]}
    gate_ABG = _rows(gate, None)
    return _launch(_rows(x, None), weight, gate_ABG, x.shape, gate.dtype, eps, flags)


def constants(width: int) -> dict[str, int]:
    """Rows of a program and their padded width."""
    block = 1 << (width - 1).bit_length()
    assert block <= WIDEST
    return {"G": width, "BLOCK": block, "R": max(1, ELEMENTS // block)}


def warps(values: dict[str, int]) -> int:
    """16 values a thread, between 4 and 16 warps."""
    return min(16, max(4, values["R"] * values["BLOCK"] // (32 * THREAD_ELEMENTS)))


def _rows(x: torch.Tensor, group: int | None) -> torch.Tensor:
    """x as [A, B, G] with values of a row side by side; copied only where it must be."""
    if group is not None:
        x = x.reshape(-1, x.shape[-1]).unflatten(-1, (-1, group))
    elif x.dim() != 3:
        x = x.reshape(-1, 1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(
    x_ABG: torch.Tensor,
    weight: torch.Tensor | None,
    gate_ABG: torch.Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    eps: float,
    flags: dict[str, bool | int],
) -> torch.Tensor:
    assert x_ABG.shape == gate_ABG.shape
    assert weight is None or weight.is_contiguous()
    out = torch.empty(shape, dtype=dtype, device=x_ABG.device)
    a, b, width = x_ABG.shape
    if out.numel() == 0:
        return out
    values = constants(width)
    kernel[(-(-a * b // values["R"]),)](
        x_ABG, x_ABG if weight is None else weight, gate_ABG, out, a * b, b, x_ABG.stride(0),
        x_ABG.stride(1), gate_ABG.stride(0), gate_ABG.stride(1), eps, WEIGHTED=weight is not None,
        **values, **flags, num_warps=warps(values),
    )  # fmt: skip
    return out
