"""The variants of the routers' kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernels.aot.variant import Variant
from kernels.router import launch
from kernels.router.triton import SIGMOID, SOFTMAX, SQRT_SOFTPLUS, given_weights, route


@dataclass(frozen=True)
class Router:
    """A router of a served model."""

    model: str
    scoring: int
    experts: int
    top_k: int


ROUTERS = (
    Router("DeepSeek-V4", SQRT_SOFTPLUS, 256, 6),
    Router("DeepSeek-V4.1", SQRT_SOFTPLUS, 384, 6),
    Router("DeepSeek-V4.1 draft", SQRT_SOFTPLUS, 128, 3),
    Router("GLM-5.3", SIGMOID, 288, 8),
    Router("Qwen3.8-Next", SOFTMAX, 512, 10),
)
ROUTE = {
    "logits": "*fp32", "bias": "*fp32", "ids": "*i64", "weights": "*fp32", "bias_stride": "i32",
    "eps": "fp32", "scale": "fp32",
}  # fmt: skip
GIVEN = {
    "logits": "*fp32", "ids": "*i64", "weights": "*fp32", "eps": "fp32", "scale": "fp32",
    "E": "i32",
}  # fmt: skip
ALIGNED = frozenset({"logits", "bias", "ids", "weights"})


def variants(target: int) -> Iterator[Variant]:
    """The same for every target."""
    for router in ROUTERS:
        values = launch.constants(router.experts, router.scoring, router.top_k, normalise=True)
        yield Variant(f"route {router.model}", route, ROUTE, values, ALIGNED, launch.WARPS, 3)
    values = {"SCORING": SQRT_SOFTPLUS, "TOP_K": 6, "NORMALISE": True, "BK": 8}
    aligned = (ALIGNED - {"bias"}) | {"E"}
    label = "weights of given experts DeepSeek-V4"
    yield Variant(label, given_weights, GIVEN, values, aligned, launch.WARPS, 3)
