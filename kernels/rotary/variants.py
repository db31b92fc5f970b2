"""The variants of the rotary kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.rotary import launch
from kernels.rotary.triton import angles, halves, tail_pairs

ANGLES = {
    "positions": "*i64", "frequencies": "*fp32", "cos": "*fp32", "sin": "*fp32", "N": "i32",
    "scaling": "fp32",
}  # fmt: skip
TURNED = {
    "x": "*bf16", "cos": "*fp32", "sin": "*fp32", "out": "*bf16", "TH": "i32", "H": "i32",
    "stride_t": "i32", "stride_h": "i32",
}  # fmt: skip
# Width of a head and frequencies: Qwen, its indexer; then DeepSeek and its indexer.
HALVES = ((256, 32), (128, 32))
PAIRS = ((512, 32), (128, 32))


def variants(target: int) -> Iterator[Variant]:
    """The same for every target."""
    for own in (False, True):
        values: dict[str, int | bool] = {"F": 32, "OWN": own, "BLOCK": launch.ANGLES}
        aligned = frozenset(ANGLES) - {"scaling"}
        label = f"angles{' of own positions' if own else ''}"
        yield Variant(label, angles, ANGLES, values, aligned, launch.WARPS, 3)
    aligned = frozenset(TURNED) - {"TH", "H"}
    for width, frequencies in HALVES:
        values = {**launch.halves_constants(width, frequencies)}
        label = f"rotary halves {width}"
        yield Variant(label, halves, TURNED, values, aligned, launch.WARPS, 3)
    for width, frequencies in PAIRS:
        for inverse in (False, True):
            values = {**launch.pairs_constants(width, frequencies), "INVERSE": inverse}
            label = f"rotary tail pairs {width}{' inverse' if inverse else ''}"
            yield Variant(label, tail_pairs, TURNED, values, aligned, launch.WARPS, 3)
