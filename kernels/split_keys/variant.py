"""The merge as a variant, for the operations whose launches end with it."""

from __future__ import annotations

from kernels.aot.variant import Variant
from kernels.split_keys import MERGE_STAGES, MERGE_WARPS, merge, merge_constants


def merge_variant(width: int, splits: int, *, sink: bool, gated: bool = False) -> Variant:
    """The merge of bf16 outputs, fp32 sinks and bf16 gates."""
    arguments = {
        "values": "*fp32", "stats": "*fp32", "sinks": "*fp32" if sink else "*bf16",
        "gate": "*bf16", "out": "*bf16", "heads": "i32", "gate_token": "i32", "gate_head": "i32",
    }  # fmt: skip
    label = f"merge {splits}x{width}{' sink' if sink else ''}{' gated' if gated else ''}"
    pointers = frozenset(name for name, kind in arguments.items() if kind.startswith("*"))
    return Variant(
        label, merge, arguments, merge_constants(width, splits, sink=sink, gated=gated), pointers,
        MERGE_WARPS, MERGE_STAGES,
    )  # fmt: skip
