"""The operations that have Triton kernels, in order of their names."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from kernels.aot.variant import Variant

KERNELS = Path(__file__).parents[1]


def operations(module: str) -> Iterator[ModuleType]:
    """`module` of every operation that has it: `variants`, or `bench`."""
    for path in sorted(KERNELS.glob(f"*/{module}.py")):
        yield importlib.import_module(f"kernels.{path.parent.name}.{module}")


def variants(target: int) -> Iterator[Variant]:
    """Every kernel with every tuned configuration of `target`, without repeats.

    An operation with kernels has `kernels/<op>/variants.py` with
    `variants(target) -> Iterator[Variant]`; its name comes before their labels.
    """
    seen: set[tuple[object, ...]] = set()
    for module in operations("variants"):
        operation = module.__name__.split(".")[1]
        for variant in module.variants(target):
            if variant.key not in seen:
                seen.add(variant.key)
                yield replace(variant, label=f"{operation}: {variant.label}")
