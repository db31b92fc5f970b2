"""Rotary frequencies from a config's `rope_parameters`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RotaryFrequencies:
    """Rotation of the first 2 * F dimensions of a head.

    `inverse_F` fp32 [F]; cos and sin are multiplied by `scaling` (1 except for YaRN).
    """

    inverse_F: torch.Tensor
    scaling: float = 1.0

    def to(self, device: torch.device) -> RotaryFrequencies:
        """The same on another device."""
        return RotaryFrequencies(self.inverse_F.to(device), self.scaling)


def default_rope(theta: float, width: int) -> RotaryFrequencies:
    """theta^(-2i / width) for i < width / 2, rounded to fp32 step by step as the release does."""
    return RotaryFrequencies(_geometric(theta, width))


def yarn_rope(
    theta: float,
    width: int,
    *,
    factor: float,
    original_positions: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> RotaryFrequencies:
    """YaRN: slow frequencies divided by `factor`, fast ones kept, a linear ramp between.

    Source: YaRN (arXiv 2309.00071), with scaling 0.1 ln(factor) + 1.
    """
    half = width // 2

    def slot(rotations: float) -> float:
        turns = original_positions / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(theta))

    low, high = max(math.floor(slot(beta_fast)), 0), min(math.ceil(slot(beta_slow)), width - 1)
    steps = torch.arange(half, dtype=torch.float32)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    base = _geometric(theta, width)
    mixed = base / factor * ramp + base * (1 - ramp)
    return RotaryFrequencies(mixed, 0.1 * math.log(factor) + 1.0)


def _geometric(theta: float, width: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
