"""Hadamard rotation: spreads outliers over a vector before it is stored in few bits."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.hadamard import reference


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x H / sqrt(D) over the last dimension D, a power of two; H the Sylvester matrix.

    Orthonormal and its own inverse, so scalar products stay what they were. Any float type in,
    fp32 inside, returned in the type of x. Source: indexer of DeepSeek-V4.
    """
    width = x.shape[-1]
    assert width & (width - 1) == 0
    if not backend.uses_triton(x):
        return reference.hadamard(x)
    from kernels.hadamard import launch

    return launch.hadamard(x)
