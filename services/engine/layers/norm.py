"""Normalisation layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.rms_norm import rms_norm
from services.engine.checkpoints.loader import WeightReader


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """RMS norm over the last dimension, or over groups of it; `zero_centred` scales by 1 + w."""

    weight: torch.Tensor
    eps: float
    group_size: int | None = None
    zero_centred: bool = True

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        name: str,
        size: int,
        eps: float,
        group_size: int | None = None,
        *,
        zero_centred: bool = True,
    ) -> RmsNorm:
        """Read `<name>.weight` [size]; every rank holds the whole."""
        return cls(reader.tensor(f"{name}.weight", (size,)), eps, group_size, zero_centred)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return rms_norm(
            x,
            self.weight,
            eps=self.eps,
            group_size=self.group_size,
            zero_centred=self.zero_centred,
            out_dtype=out_dtype,
        )
