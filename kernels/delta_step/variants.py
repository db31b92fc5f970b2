"""The variants of the step that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.delta_step import launch
from kernels.delta_step.decode.triton import delta_decode
from kernels.delta_step.triton import (
    BOUNDED_DECAY,
    HEAD_DECAY,
    NUMBERS,
    SIGMOID_GATE,
    SILU_GATE,
    WARPS,
    delta_step,
)

KEY_DIM, VALUE_DIM = 128, 128
# Name, value heads of a key head, decay, gate, type of `a_log` and `dt_bias`.
LAYERS = (
    ("Qwen3.8", 3, HEAD_DECAY.value, SILU_GATE.value, "bf16"),
    ("Qwen3.8-Flash", 3, HEAD_DECAY.value, SIGMOID_GATE.value, "bf16"),
    ("GLM-5.3", 1, BOUNDED_DECAY.value, SIGMOID_GATE.value, "fp32"),
)
TOKENS = (1, 4)
ROWS = {"qkv": "*bf16", "a": "*fp32", "b": "*fp32", "z": "*bf16"}
STATES = {"windows": "*bf16", "states": "*fp32"}
WEIGHTS = {"conv": "*i64", "norm": "*bf16", "out": "*bf16"}
SLOTS = dict.fromkeys(("read_slot", "write_slot", "lengths"), "*i64")


def variants(target: int) -> Iterator[Variant]:
    """Decode and the verification of three drafts, the same for every target."""
    for name, ratio, decay, gate, rate in LAYERS:
        for tokens in TOKENS:
            kernel, words = (delta_decode, {"words": "*i64"}) if tokens == 1 else (delta_step, {})
            tensors = ROWS | STATES | WEIGHTS | SLOTS | words | {"arrived": "*i32"}
            tensors |= {"a_log": f"*{rate}", "dt_bias": f"*{rate}"}
            numbers = dict.fromkeys(NUMBERS, "i32") | {"eps": "fp32", "bound": "fp32"}
            values = launch.constants(tokens, ratio, KEY_DIM, VALUE_DIM, decay, gate)
            yield Variant(
                f"{name} {tokens} tokens", kernel, tensors | numbers, values, frozenset(tensors),
                WARPS, launch.STAGES,
            )  # fmt: skip
