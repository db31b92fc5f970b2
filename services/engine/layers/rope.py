"""Rotary frequencies from a config's `rope_parameters`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.rotary import rotary_angles


@dataclass(frozen=True, slots=True)
class RotaryFrequencies:
    """Rotation of the first 2 * F dimensions of a head.

    `inverse_F` fp32 [F]; cos and sin are multiplied by `scaling` (1 except for YaRN). `axis_F`
    int64 [F] says which of a token's three positions (time, row, column) turns each frequency;
    None for models whose tokens have one position.
    """

    inverse_F: torch.Tensor
    scaling: float = 1.0
    axis_F: torch.Tensor | None = None

    def to(self, device: torch.device) -> RotaryFrequencies:
        """The same on another device."""
        axis_F = None if self.axis_F is None else self.axis_F.to(device)
        return RotaryFrequencies(self.inverse_F.to(device), self.scaling, axis_F)

    def angles(
        self, positions_T: torch.Tensor, axes_T3: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin fp32 [T, F] at positions int64 [T], or at three positions of every token."""
        positions = positions_T
        if axes_T3 is not None and self.axis_F is not None:
            positions = axes_T3.index_select(1, self.axis_F)
        return rotary_angles(positions, self.inverse_F, self.scaling)


def interleaved_axes(sections: Sequence[int]) -> torch.Tensor:
    """Axis of each of sum(sections) frequencies, int64: 0, 1, 2, 0, 1, 2, ... as long as rows (1)
    and columns (2) have frequencies left, time (0) else. Source: Qwen3.5 (mrope_interleaved)."""
    axis_F = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axis_F[axis : 3 * sections[axis] : 3] = axis
    return axis_F


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
