"""The formula in fp64 with torch's own functions: for tests and for the benchmark."""

from __future__ import annotations

import torch


def read(
    streams_TX: torch.Tensor,
    norm_X: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    count: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H] and weights [T, C] with the matrices down, up and inject."""
    down, up, inject = (matrix.double() for matrix in matrices)
    r = streams_TX.double().unflatten(1, (count, -1))
    unit = (r / (r.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(1)
    n = unit * (1 + norm_X.double())
    low = torch.nn.functional.silu(torch.nn.functional.linear(n, down) / count)
    gate = torch.nn.functional.linear(low, up).sigmoid()
    x = (gate * n).unflatten(1, (count, -1)).mean(1)
    return x, 2 * (torch.nn.functional.linear(n, inject) / count).sigmoid()
