"""The variants of the n-gram embedding kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.engram.variants import gather_variant
from kernels.ple import launch
from kernels.ple.triton import gate, hash_rows

STAGES = 3
STREAMS, WIDTH = 4, 2560
HASHES = ((3, 16, True), (4, 24, False))  # PLE; Engram, whose codes are cut before
ROW_BYTES = 160


def variants(target: int) -> Iterator[Variant]:
    """The released tables' hashes, rows and gate."""
    pointers = dict.fromkeys(("codes", "multipliers", "sizes", "offsets", "rows"), "*i64")
    for order, heads, cut in HASHES:
        yield Variant(
            f"hash {order} {heads}", hash_rows, pointers | {"tokens": "i32", "eos": "i32"},
            launch.hash_constants(order, heads, cut=cut), frozenset(pointers), launch.HASH_WARPS,
            STAGES,
        )  # fmt: skip
    yield gather_variant(ROW_BYTES, scaled=False, listed=True)
    data = dict.fromkeys(("key", "query", "value", "out"), "*fp32")
    sizes = dict.fromkeys(("key_token", "query_token", "value_token", "width"), "i32")
    yield Variant(
        "gate", gate, data | sizes | {"root": "fp32"},
        {"COUNT": STREAMS, "BLOCK": launch.power_of_two(WIDTH)},
        frozenset(data) | frozenset(sizes), launch.GATE_WARPS, STAGES,
    )  # fmt: skip
