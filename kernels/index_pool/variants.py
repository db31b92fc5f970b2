"""The variants of the pooling kernels that servers launch; selection: `kernels.lightning_index`."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.index_pool import launch
from kernels.index_pool.triton import pool_keys, write_pools

RATIO, WIDTH = 4, 128  # GLM-5.3


def variants(target: int) -> Iterator[Variant]:
    """Keys of GLM-5.3: pooled, and stored plainly or as codes."""
    pointers = dict.fromkeys(("keys", "gates", "bias", "out"), "*bf16")
    sizes = dict.fromkeys(("T", "keys_stride", "gates_stride"), "i32")
    yield Variant(
        "pool_keys", pool_keys, pointers | sizes, {**launch.pool_constants(RATIO, WIDTH)},
        frozenset(pointers), launch.WARPS, launch.STAGES,
    )  # fmt: skip
    for coded in (False, True):
        values, scales = ("*u8", "*fp32") if coded else ("*bf16", "*bf16")
        tensors = {"keys": "*bf16", "values": values, "scales": scales}
        tensors |= dict.fromkeys(("table", "sequence_of", "positions"), "*i64")
        sizes = dict.fromkeys(("T", "sequences", "width", "pages", "shift"), "i32")
        yield Variant(
            f"write_pools{' coded' if coded else ''}", write_pools, tensors | sizes,
            launch.write_constants(WIDTH, RATIO, coded=coded), frozenset(tensors), launch.WARPS,
            launch.STAGES,
        )  # fmt: skip
