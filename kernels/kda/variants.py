"""The variants of KDA that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.gated_delta import configs
from kernels.gated_delta.variants import WIDTH, pass_variants, variant
from kernels.kda.launch import CHANNELS
from kernels.kda.triton import log_decay, prepare

HEADS = 64  # of GLM-5.3 on one card


def variants(target: int) -> Iterator[Variant]:
    """q, k and v are parts of one row, as the convolution leaves them."""
    yield variant("kda prepare", prepare, {"K": WIDTH})
    yield from pass_variants(target, HEADS, 1, 3 * HEADS * WIDTH, channels=True)
    pointers = {"f": "*fp32", "a_log": "*bf16", "dt_bias": "*bf16", "out": "*fp32"}
    constants = {"HK": HEADS * WIDTH, "K": WIDTH, "BOUNDED": True, "N": CHANNELS}
    yield Variant(
        "kda log_decay", log_decay, pointers | {"f_stride": "i32", "bound": "fp32"}, constants,
        frozenset((*pointers, "f_stride")), configs.WARPS, 3,
    )  # fmt: skip
