"""Compiles tiles of many rows for sm80 and prints instructions for each tensor core instruction.

In a process without a card: Triton's interpreter is chosen for a whole process.
"""

from __future__ import annotations

import json

from kernels.aot.compile import compile_variant
from kernels.quant_linear.tuning import Config
from kernels.quant_linear.variants import LAYOUTS, variant

TILE = Config("matrix", 128, 64, 4, 64, 3, 1, True)
# Tensor core instructions of 16 x 8 x 16 that a warp of the tile issues in a step.
PRODUCTS = {"fp8": 64, "int4": 128, "mxfp4": 128}


def main() -> None:
    found = {}
    for name, products in PRODUCTS.items():
        layout = next(layout for layout in LAYOUTS if layout.name == name)
        report = compile_variant(variant(layout, TILE), 80)
        assert not report.problem, report.problem
        found[name] = report.loop_instructions / products
    print(json.dumps(found))


if __name__ == "__main__":
    main()
