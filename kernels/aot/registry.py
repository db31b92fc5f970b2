"""The operations that have Triton kernels, in order."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from kernels.aot.variant import Variant

# Each module has variants(target) -> Iterator[Variant].
OPERATIONS = ("kernels.quant_linear.variants",)


def variants(target: int) -> Iterator[Variant]:
    """Every kernel with every tuned configuration of `target`, without repeats."""
    seen: set[tuple[object, ...]] = set()
    for module in OPERATIONS:
        for variant in importlib.import_module(module).variants(target):
            if variant.key not in seen:
                seen.add(variant.key)
                yield variant
