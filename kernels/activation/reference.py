"""Built from `exp`, `log1p` and IEEE-exact operations only.

torch's own sigmoid, silu and softplus compute the last elements of a buffer with other code than
the rest, so that a value would depend on how many values are computed beside it.
"""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.float().neg().exp_().add_(1.0).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x / x.neg().exp_().add_(1.0)


def softplus(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x.clamp_min(0.0).add_(x.abs().neg_().exp_().log1p_())


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """fp32, whatever the type of the inputs."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return silu(gate).mul_(up)
