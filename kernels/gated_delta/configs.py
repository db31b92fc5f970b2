"""Configurations of the kernels per card."""

from __future__ import annotations

import torch

from kernels import backend

WARPS = 4
# Values that a program of the pass keeps, and its warps: eight would do the same products twice.
BLOCK_VALUES = 32
PASS_WARPS = 4
# Of the pass: one chunk in flight; sm86 and sm89 have no memory for a second one.
STAGES = dict.fromkeys((80, 86, 89, 90), 2)


def stages(device: torch.device) -> int:
    """Of the pass; 1 on a CPU, where the interpreter does not look at them."""
    return STAGES[backend.target(device.index or 0)] if device.type == "cuda" else 1
