"""What this process can run: the one place that decides between reference and Triton."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

# Targets that kernels are tuned and compiled for: Ampere, Ada, and Hopper for measuring.
TARGETS = (80, 86, 89, 90)
# Shared memory of one block, KiB: CUDA programming guide, limits by compute capability.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227}


@cache
def has_package(name: str) -> bool:
    """Whether `name` can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def uses_triton(x: torch.Tensor) -> bool:
    """CUDA tensors go to Triton kernels, CPU tensors to the reference.

    Raises RuntimeError for a CUDA tensor where Triton is not installed.
    """
    if not x.is_cuda:
        return False
    if not has_package("triton"):
        raise RuntimeError("a CUDA tensor needs the package triton, which is not installed")
    return True


@cache
def target(device_index: int) -> int:
    """The tuning target of a card: its compute capability, or the nearest below that is tuned.

    TRITON_OVERRIDE_ARCH (sm80 and so on), which makes Triton lower for another card, is followed.
    """
    override = os.environ.get("TRITON_OVERRIDE_ARCH", "")
    if override:
        found = int(override.removeprefix("sm"))
    else:
        major, minor = torch.cuda.get_device_capability(device_index)
        found = 10 * major + minor
    fitting = [known for known in TARGETS if known <= found]
    if not fitting:
        raise RuntimeError(f"compute capability {found} is older than {TARGETS[0]}")
    return fitting[-1]
