"""The variants of the gated delta rule that servers launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kernels.aot.variant import Variant
from kernels.gated_delta import configs
from kernels.gated_delta.triton import delta_pass, finish, prepare

WIDTH = 128
KEY_HEADS, HEADS = 16, 48  # of the Qwen3.8 models on one card
BF16 = ("q", "k", "v", "keys", "queries", "updates", "solved", "weights")
FP32 = ("decay", "beta", "factors", "state", "states")
INT64 = ("starts", "write_token", "read_slot", "write_slot")
KINDS = {
    **dict.fromkeys(BF16, "*bf16"),
    **dict.fromkeys(FP32, "*fp32"),
    **dict.fromkeys(INT64, "*i64"),
    "scale": "fp32",
}
ALIGNED = frozenset((*BF16, *FP32, *INT64, "out", "q_stride", "k_stride", "v_stride"))


def variants(target: int) -> Iterator[Variant]:
    """q, k and v are parts of one row, as the convolution leaves them."""
    row = (2 * KEY_HEADS + HEADS) * WIDTH
    yield variant("gated_delta prepare", prepare, {"K": WIDTH})
    yield from pass_variants(target, HEADS, HEADS // KEY_HEADS, row, channels=False)


def pass_variants(
    target: int, heads: int, group: int, row: int, *, channels: bool
) -> Iterator[Variant]:
    """States in tensors of their own, and in a pool with bf16 outputs.

    `row`: elements between tokens of q, k and v.
    """
    shape = {"H": heads, "GROUP": group, **dict.fromkeys(("Q_ROW", "K_ROW", "V_ROW"), row)}
    sizes = {"K": WIDTH, "V": WIDTH, "BV": configs.BLOCK_VALUES, "CHANNELS": channels}
    kind = "kda" if channels else "gated_delta"
    for pool in (False, True):
        constants = {**sizes, "POOL": pool}
        label = f"{kind}{' pool' * pool}"
        for out in ("*bf16",) if pool else ("*bf16", "*fp32"):
            stages = configs.STAGES[target]
            chunks = variant(
                f"{label} pass {out[1:]}", delta_pass, {**constants, **shape}, stages, out
            )
            yield replace(chunks, warps=configs.PASS_WARPS)
        yield variant(f"{label} finish", finish, constants)


def variant(
    label: str, kernel: Any, constants: dict[str, int | bool], stages: int = 1, out: str = "*fp32"
) -> Variant:
    names = [n for n in kernel.arg_names if n not in constants]
    arguments = {n: out if n == "out" else KINDS.get(n, "i32") for n in names}
    aligned = ALIGNED & set(names)
    return Variant(label, kernel, arguments, constants, aligned, configs.WARPS, stages)
