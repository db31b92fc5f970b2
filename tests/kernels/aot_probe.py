"""Compiles three variants for sm86 and prints their reports: run in a process without a card."""

from __future__ import annotations

import json

from kernels.aot.compile import compile_variant
from kernels.quant_linear.tuning import Config
from kernels.quant_linear.variants import LAYOUTS, variant

SMALL = Config("matrix", 64, 64, 4, 16, 2)
CASES = {
    "fits": SMALL,
    "shared": Config("matrix", 128, 64, 4, 64, 8),
    "spills": Config("matrix", 256, 64, 4, 64, 2, 1, True),
}


def main() -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == "int4")
    reports = {
        name: compile_variant(variant(layout, config), 86).as_dict()
        for name, config in CASES.items()
    }
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
