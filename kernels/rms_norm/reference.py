from __future__ import annotations

import torch

from kernels.activation.reference import sigmoid, silu


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    group_size: int | None,
    zero_centred: bool,
) -> torch.Tensor:
    x = x.float()
    grouped = x if group_size is None else x.view(*x.shape[:-1], -1, group_size)
    inverse = grouped.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    y = (grouped * inverse).view(x.shape)
    if weight is None:
        return y
    scale = weight.float()
    return y.mul_(scale + 1.0 if zero_centred else scale)


def rms_norm_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gate_type: str
) -> torch.Tensor:
    act = silu if gate_type == "silu" else sigmoid
    return rms_norm(x, weight, eps, None, zero_centred=False).mul_(act(gate))
