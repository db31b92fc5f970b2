"""Launches of the Triton kernels: one for a call. None synchronises with the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.rotary.triton import angles as angles_kernel
from kernels.rotary.triton import halves, tail_pairs

# Legend: T tokens, H heads, D values of a head, F frequencies.

ANGLES = 256  # of a program
ELEMENTS = 2048  # of a program
WARPS = 4


def rotary_angles(
    positions: torch.Tensor, frequencies_F: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions int64 [T, 1] or [T, F]."""
    count = frequencies_F.numel()
    positions, shape = positions.contiguous(), (positions.shape[0], count)
    assert positions.shape[1] in (1, count) and frequencies_F.is_contiguous()
    cos, sin = torch.empty((2, *shape), dtype=torch.float32, device=positions.device)
    total = cos.numel()
    if total:
        angles_kernel[(-(-total // ANGLES),)](
            positions, frequencies_F, cos, sin, total, scaling, F=count,
            OWN=positions.shape[1] == count and count > 1, BLOCK=ANGLES, num_warps=WARPS,
        )  # fmt: skip
    return cos, sin


def apply_rotary(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    """See the package. Heads of x may lie apart."""
    return _launch(halves, x_THD, cos_TF, sin_TF, halves_constants)


def rotate_tail_pairs(
    x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor, *, inverse: bool
) -> torch.Tensor:
    """See the package. Heads of x may lie apart."""
    assert x_THD.shape[2] % 2 == 0
    return _launch(tail_pairs, x_THD, cos_TF, sin_TF, pairs_constants, INVERSE=inverse)


def halves_constants(width: int, frequencies: int) -> dict[str, int]:
    """Of rows of `width` values."""
    rest = width - 2 * frequencies
    return {
        "D": width,
        "F": frequencies,
        "BF": _power_of_two(frequencies),
        "BREST": _power_of_two(max(rest, 1)),
        "R": max(1, ELEMENTS // _power_of_two(width)),
    }


def pairs_constants(width: int, frequencies: int) -> dict[str, int]:
    """Of rows of `width` values."""
    block = _power_of_two(width)
    return {"D": width, "F": frequencies, "BD": block, "R": max(1, ELEMENTS // block)}


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _launch(
    kernel: Any,
    x_THD: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    constants: Callable[[int, int], dict[str, int]],
    **flags: bool,
) -> torch.Tensor:
    x_THD = x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()
    cos_TF, sin_TF = cos_TF.contiguous(), sin_TF.contiguous()
    assert cos_TF.dtype == sin_TF.dtype == torch.float32
    tokens, heads, width = x_THD.shape
    out = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    if out.numel():
        values = constants(width, cos_TF.shape[1])
        kernel[(-(-tokens * heads // values["R"]),)](
            x_THD, cos_TF, sin_TF, out, tokens * heads, heads, x_THD.stride(0), x_THD.stride(1),
            **values, **flags, num_warps=WARPS,
        )  # fmt: skip
    return out
