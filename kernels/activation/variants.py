"""The variants of the pointwise kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.activation import launch
from kernels.activation.triton import pointwise, silu_and_mul
from kernels.aot.variant import Variant

POINTWISE = {"x": "*fp32", "out": "*fp32", "N": "i32"}
PRODUCT = {
    "gate": "*bf16", "up": "*bf16", "out": "*bf16", "gate_stride": "i32", "up_stride": "i32",
    "W": "i32", "limit": "fp32",
}  # fmt: skip


def variants(target: int) -> Iterator[Variant]:
    """The same for every target."""
    for name, kind in launch.KINDS.items():
        values: dict[str, int | bool] = {"KIND": kind, "BLOCK": launch.BLOCK}
        aligned = frozenset(POINTWISE)
        yield Variant(name, pointwise, POINTWISE, values, aligned, launch.WARPS, 3)
    for limited in (False, True):
        values = {"LIMITED": limited, "BLOCK": launch.BLOCK}
        label = f"silu_and_mul{' limited' if limited else ''}"
        aligned = frozenset(PRODUCT) - {"limit"}
        yield Variant(label, silu_and_mul, PRODUCT, values, aligned, launch.WARPS, 3)
