"""The variants of the embedding kernel that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.embedding.launch import BLOCK, WARPS
from kernels.embedding.triton import embed

STAGES = 3


def variants(target: int) -> Iterator[Variant]:
    """Of a bf16 table."""
    arguments = {
        "ids": "*i64", "table": "*bf16", "out": "*bf16", "rows": "i32", "first": "i32",
        "width": "i32",
    }  # fmt: skip
    aligned = frozenset(("ids", "table", "out", "width"))
    yield Variant("rows", embed, arguments, {"BLOCK": BLOCK}, aligned, WARPS, STAGES)
