from __future__ import annotations

import torch


def rotary_angles(
    positions: torch.Tensor, inverse_frequencies_F: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    angles_TF = positions.float() * inverse_frequencies_F
    return angles_TF.cos().mul_(scaling), angles_TF.sin().mul_(scaling)


def apply_rotary(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    width = cos_TF.shape[-1]
    cos, sin = cos_TF[:, None], sin_TF[:, None]
    x = x_THD.float()
    low, high, rest = x[..., :width], x[..., width : 2 * width], x[..., 2 * width :]
    out = torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)
    return out.to(x_THD.dtype)


def rotate_tail_pairs(
    x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor
) -> torch.Tensor:
    plain = x_THD.shape[-1] - 2 * cos_TF.shape[-1]
    cos, sin = cos_TF[:, None], sin_TF[:, None]
    x = x_THD.float()
    a, b = x[..., plain::2], x[..., plain + 1 :: 2]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., :plain], turned], dim=-1).to(x_THD.dtype)
