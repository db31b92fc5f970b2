"""humming-kernels beside Triton: our own use of its prebuilt kernels, see kernels/humming.

None of it takes part where the package is not installed or no kernels were built for the card:

    python -m kernels.humming build --target 80 --card h200 --models bench --out DIR
    WARHORSE_HUMMING=DIR TRITON_OVERRIDE_ARCH=sm80 python -m kernels.bench
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels.humming.manifest import ManifestError
from kernels.humming.matrix import HummingMatrix
from kernels.humming.runtime import library
from kernels.humming.select import prepared
from kernels.quant_linear.launch import QuantMatrix


def matrices(stored: Sequence[QuantMatrix]) -> list[HummingMatrix] | None:
    """Matrices or stacks in checkpoint order, in humming's; None where it does not take them."""
    if isinstance(library(stored[0].codes.device), ManifestError):
        return None
    ready = [prepared(matrix, "humming") for matrix in stored]
    found = [matrix for matrix in ready if matrix is not None]
    return found if found and len(found) == len(ready) else None
