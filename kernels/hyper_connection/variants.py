"""The variants of the hyper-connection kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.hyper_connection import launch
from kernels.hyper_connection.triton import combine, down, up, write

SIZES = (2560, 4, 320)  # of Qwen3.8-Flash-Next: H, C, L
DOWN = {
    "streams": "*fp32", "norm": "*bf16", "down": "*bf16", "inject": "*bf16", "partial": "*fp32",
    "T": "i32",
}  # fmt: skip
COMBINE = {
    "partial": "*fp32", "low": "*bf16", "weights": "*fp32", "inverse": "*fp32", "T": "i32",
    "eps": "fp32",
}  # fmt: skip
UP = {
    "streams": "*fp32", "norm": "*bf16", "low": "*bf16", "up": "*bf16", "inverse": "*fp32",
    "out": "*fp32", "T": "i32",
}  # fmt: skip
WRITE = {"streams": "*fp32", "y": "*bf16", "inject": "*fp32", "out": "*fp32", "H": "i32"}
NUMBERS = {"T", "eps"}


def variants(target: int) -> Iterator[Variant]:
    """The same for every target."""
    for tokens in (1, 2 * launch.FEW_TOKENS):
        first = launch.down_constants(tokens, *SIZES, split_x=True)
        last = launch.up_constants(tokens, *SIZES, split_x=True)
        form = "few tokens" if tokens == 1 else "many tokens"
        yield _variant(f"hyper down {form}", down, DOWN, first, launch.DOWN_STAGES)
        yield _variant(
            f"hyper combine {form}", combine, COMBINE, launch.combine_constants(first), 3
        )
        yield _variant(f"hyper up {form}", up, UP, last, launch.UP_STAGES)
    yield _variant("hyper write", write, WRITE, {"C": SIZES[1], "BLOCK": launch.COLUMNS}, 3)


def _variant(
    label: str, kernel: object, arguments: dict[str, str], constants: launch.Constants, stages: int
) -> Variant:
    aligned = frozenset(arguments) - NUMBERS
    warps = launch.product_warps(constants) if "BT" in constants else launch.WARPS
    return Variant(label, kernel, arguments, constants, aligned, warps, stages)
