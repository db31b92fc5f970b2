"""Builds one kernel for a target, in a process of its own: `humming_probe TARGET OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

from kernels.humming import standin
from kernels.humming.cards import card_for
from kernels.humming.shapes import Shape


def main(target: int, out: Path) -> None:
    card = card_for(target, None)
    standin.install(card, out / "cache", None)
    from kernels.humming.build import build_kernels
    from kernels.humming.plan import own_choice, planned

    shape = Shape("dense", "int4-g128", 1024, 1024)
    build_kernels([planned(shape, None, own_choice(shape, 16))], card, out, 1)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
