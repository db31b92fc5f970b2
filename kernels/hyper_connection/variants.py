"""The variants of the hyper-connection kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.cards import CARDS
from kernels.hyper_connection import launch
from kernels.hyper_connection.triton import combine, down, down_many, up, up_many, write

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
NUMBERS = {"T", "S", "STEPS", "eps"}
MANY = 2 * launch.FEW_TOKENS


def variants(target: int) -> Iterator[Variant]:
    """`combine` for each number of parts that many tokens have."""
    few, many = (launch.down_stages(t, CARDS[target]) for t in (1, MANY))
    constants = launch.down_constants(1, *SIZES, split_x=True)
    yield _variant("hyper down few tokens", down, DOWN, constants, few)
    constants = launch.down_constants(MANY, *SIZES, split_x=True)
    steps = {"S": "i32", "STEPS": "i32"}
    yield _variant("hyper down many tokens", down_many, DOWN | steps, constants, many)
    constants = launch.combine_constants(1, *SIZES, launch.MOST_PARTS)
    yield _variant("hyper combine few tokens", combine, COMBINE, constants, 3)
    for parts in (1, 2, 4, 8):
        constants = launch.combine_constants(MANY, *SIZES, parts)
        yield _variant(f"hyper combine many tokens, {parts} parts", combine, COMBINE, constants, 3)
    for tokens, kernel, form in ((1, up, "few tokens"), (MANY, up_many, "many tokens")):
        constants = launch.up_constants(tokens, *SIZES, split_x=True)
        yield _variant(f"hyper up {form}", kernel, UP, constants, launch.UP_STAGES)
    yield _variant("hyper write", write, WRITE, {"C": SIZES[1], "BLOCK": launch.COLUMNS}, 3)


def _variant(
    label: str, kernel: object, arguments: dict[str, str], constants: launch.Constants, stages: int
) -> Variant:
    aligned = frozenset(arguments) - NUMBERS
    return Variant(label, kernel, arguments, constants, aligned, launch.WARPS, stages)
