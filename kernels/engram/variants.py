"""The variants of the Engram kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.engram import launch
from kernels.engram.triton import gate, gather_words

ROW_BYTES = 264
STREAMS, WIDTH = 4, 5120
DEFAULT_STAGES = 3
GATE_STRIDES = ("x_token", "x_stream", "key_token", "key_stream", "value_token", "width")


def variants(target: int) -> Iterator[Variant]:
    """Rows of the released table, from the host and as copied from it, and the released gate."""
    for listed in (True, False):
        yield gather_variant(ROW_BYTES, scaled=True, listed=listed)
    pointers = {
        "streams": "*bf16", "keys": "*bf16", "value": "*bf16", "q": "*bf16", "k": "*bf16",
        "closed": "*u8", "out": "*bf16",
    }  # fmt: skip
    arguments = pointers | dict.fromkeys(GATE_STRIDES, "i32") | {"eps": "fp32", "root": "fp32"}
    aligned = frozenset(pointers) | frozenset(GATE_STRIDES)
    for closed in (True, False):
        constants = launch.gate_constants(STREAMS, WIDTH, closed=closed)
        kinds = arguments if closed else arguments | {"closed": arguments["out"]}  # not read
        yield Variant(
            f"gate{' with closed tokens' if closed else ''}", gate, kinds, constants, aligned,
            launch.GATE_WARPS, DEFAULT_STAGES,
        )  # fmt: skip


def gather_variant(row_bytes: int, *, scaled: bool, listed: bool) -> Variant:
    """Rows of whole words to bf16."""
    constants = launch.gather_constants(row_bytes, scaled=scaled, listed=listed, aligned=True)
    arguments = {
        "table": "i64", "ids": "*i64" if listed else "*bf16", "out": "*bf16", "rows": "i32",
        "count": "i32", "scale": "fp32",
    }  # fmt: skip
    return Variant(
        f"gather {row_bytes} B{' by id' if listed else ''}", gather_words, arguments, constants,
        frozenset(("ids", "out")), launch.GATHER_WARPS, DEFAULT_STAGES,
    )  # fmt: skip
