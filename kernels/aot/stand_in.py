"""A stand-in for a card: Triton's own launch code then decides what a launch needs compiled.

What Triton compiles, and the key that its cache files it under, follow from how a launch's values
are specialised (a multiple of 16, the value 1, a type). Only its launch code knows that in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kernels.aot.variant import Variant

ALIGNED, UNALIGNED = 32, 33
BEYOND_32_BITS = 1 << 40
TYPES = {
    "i1": torch.bool, "i8": torch.int8, "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32,
    "i64": torch.int64, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32,
    "fp64": torch.float64,
}  # fmt: skip


class StandIn:
    """What Triton asks of a driver before it compiles. Nothing can be launched through it."""

    def __init__(self, target: int) -> None:
        self._target = GPUTarget("cuda", target, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def stand_in_for(target: int) -> None:
    """Make this process see a card of sm`target`, for good: it can launch no kernel any more."""
    if not isinstance(driver._active, StandIn):
        driver.set_active(StandIn(target))
    if driver.active.get_current_target().arch != target:
        raise RuntimeError("one process compiles for one target")


@dataclass(frozen=True)
class Address:
    """Stands for a tensor in a launch."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def sample_launch(variant: Variant) -> list[Any]:
    """Values of all of the kernel's arguments, in order, that Triton specialises to `variant`."""
    return [
        _sample(variant.arguments[name], name in variant.aligned)
        if name in variant.arguments
        else variant.constants[name]
        for name in variant.kernel.arg_names
    ]


def _sample(kind: str, aligned: bool) -> Any:
    value = ALIGNED if aligned else UNALIGNED
    if kind.startswith("*"):
        return Address(TYPES[kind[1:]], value)
    if kind in ("fp32", "fp64"):
        return float(value)
    return {"i1": True, "i32": value, "i64": BEYOND_32_BITS + value}[kind]
