"""Pointwise non-linearities."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.activation import reference


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), any shape, computed and returned in fp32."""
    return _pointwise(x, "sigmoid")


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), any shape, computed and returned in fp32."""
    return _pointwise(x, "silu")


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), any shape, computed and returned in fp32."""
    return _pointwise(x, "softplus")


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """silu(gate) * up, equal shapes, computed in fp32, returned in the type of `gate`.

    With `limit` gate is first cut to at most `limit` and up to -limit..limit.
    """
    assert gate.shape == up.shape and gate.dtype == up.dtype
    if not backend.uses_triton(gate):
        return reference.silu_and_mul(gate, up, limit).to(gate.dtype)
    from kernels.activation import launch

    return launch.silu_and_mul(gate, up, limit)


def _pointwise(x: torch.Tensor, kind: str) -> torch.Tensor:
    if not backend.uses_triton(x):
        function = {
            "sigmoid": reference.sigmoid,
            "silu": reference.silu,
            "softplus": reference.softplus,
        }
        return function[kind](x)
    from kernels.activation import launch

    return launch.pointwise(x, kind)
