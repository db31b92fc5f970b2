"""The variants of the kernels around humming's products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kernels.aot.variant import Variant
from kernels.humming import launch
from kernels.humming.triton import align_pairs, swiglu

KINDS = {
    "ids": "*i64", "order": "*i32", "tiles": "*i32", "total": "*i32", "both": "*bf16",
    "hidden": "*bf16", "limit": "fp32",
}  # fmt: skip
# Numbers that launches never specialise.
ANY_NUMBER = frozenset({"P", "first_expert", "experts", "BM", "limit"})


def variants(target: int) -> Iterator[Variant]:
    """The same for every target."""
    for experts in (128, 256, 512):
        for pairs in (1, launch.MANY_PAIRS + 1):
            values, warps = launch.alignment(pairs)
            label = f"align {experts} by {values['BP']}"
            yield _variant(label, align_pairs, {"EXPERTS": experts} | values, warps)
    for limit in (False, True):
        yield _variant(f"swiglu limit {limit}", swiglu, {"LIMIT": limit, "BI": launch.BLOCK})


def _variant(
    label: str, kernel: object, values: Mapping[str, int | bool], warps: int = launch.WARPS
) -> Variant:
    names = [name for name in kernel.arg_names if name not in values]  # type: ignore[attr-defined]
    arguments = {name: KINDS.get(name, "i32") for name in names}
    aligned = frozenset(arguments) - ANY_NUMBER
    return Variant(label, kernel, arguments, dict(values), aligned, warps, 3)
