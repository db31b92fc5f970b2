"""Rotary position embedding on a part of each head."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.rotary import reference


def rotary_angles(
    positions: torch.Tensor, inverse_frequencies_F: torch.Tensor, scaling: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin fp32 [T, F] of position * frequency, both multiplied by `scaling`.

    positions int64 [T], or [T, F] where every frequency has its own; inverse_frequencies fp32 [F];
    fp32 so that long positions stay exact.
    """
    assert inverse_frequencies_F.dtype == torch.float32
    positions = positions if positions.dim() == 2 else positions[:, None]
    if not backend.uses_triton(positions):
        return reference.rotary_angles(positions, inverse_frequencies_F, scaling)
    from kernels.rotary import launch

    return launch.rotary_angles(positions, inverse_frequencies_F, scaling)


def apply_rotary(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    """Rotate dimension i with dimension i + F for i < F; dimensions from 2F on pass unchanged.

    x [T, H, D] with D >= 2F; computed in fp32, returned in the type of x.
    """
    assert x_THD.dim() == 3 and x_THD.shape[-1] >= 2 * cos_TF.shape[-1]
    assert x_THD.shape[0] == cos_TF.shape[0] and cos_TF.shape == sin_TF.shape
    if not backend.uses_triton(x_THD):
        return reference.apply_rotary(x_THD, cos_TF, sin_TF)
    from kernels.rotary import launch

    return launch.apply_rotary(x_THD, cos_TF, sin_TF)


def rotate_tail_pairs(
    x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """Rotate the neighbours D - 2F + 2i and D - 2F + 2i + 1 for i < F; other dimensions pass.

    (a, b) becomes (a cos - b sin, a sin + b cos); `inverse` turns back. x [T, H, D] with
    D >= 2F; computed in fp32, returned in the type of x. Source: DeepSeek-V4 partial rotary.
    """
    assert x_THD.dim() == 3 and x_THD.shape[-1] >= 2 * cos_TF.shape[-1]
    assert x_THD.shape[0] == cos_TF.shape[0] and cos_TF.shape == sin_TF.shape
    if not backend.uses_triton(x_THD):
        return reference.rotate_tail_pairs(x_THD, cos_TF, -sin_TF if inverse else sin_TF)
    from kernels.rotary import launch

    return launch.rotate_tail_pairs(x_THD, cos_TF, sin_TF, inverse=inverse)
