from __future__ import annotations

import torch


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Sums and differences of halves, log2(D) times."""
    width = x.shape[-1]
    y = x.float().flatten(0, -2)
    half = 1
    while half < width:
        a, b = y.unflatten(1, (-1, 2, half)).unbind(2)
        y = torch.stack([a + b, a - b], dim=2).flatten(1)
        half *= 2
    scaled = y * float(width**-0.5)
    return scaled.view(x.shape).to(x.dtype)
