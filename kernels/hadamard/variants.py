"""The variants of the rotation that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.hadamard import launch
from kernels.hadamard.triton import hadamard


def variants(target: int) -> Iterator[Variant]:
    """Rows of 128 values: the index queries and keys of the served models."""
    arguments = {"x": "*bf16", "out": "*bf16", "N": "i32"}
    constants: dict[str, int | bool] = {**launch.constants(128)}
    yield Variant(
        "hadamard 128", hadamard, arguments, constants, frozenset({"x", "out"}), launch.WARPS,
        launch.STAGES,
    )  # fmt: skip
