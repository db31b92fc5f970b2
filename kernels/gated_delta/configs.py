"""Configurations of the kernels per card."""

from __future__ import annotations

import torch

from kernels import backend

WARPS = 4
# Of the preparation with decays of channels, whose tiles [64, 128] fill the registers of four.
CHANNEL_WARPS = 8
# A warp of the pass keeps 16 rows of the transposed state: 64 values for four warps.
BLOCK_VALUES = 64
# Stages of the pass by target: a second chunk in flight takes more memory than sm86 and sm89 have.
STAGES = {80: 3, 86: 2, 89: 2, 90: 3}


def stages(device: torch.device) -> int:
    """Of the pass; 1 on a CPU, where the interpreter does not look at them."""
    return STAGES[backend.target(device.index or 0)] if device.type == "cuda" else 1
