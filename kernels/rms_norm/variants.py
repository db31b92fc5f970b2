"""The variants of the norm that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.rms_norm import launch
from kernels.rms_norm.triton import NO_GATE, SIGMOID_GATE, SILU_GATE, rms_norm

SIZES = ("AB", "B", "stride_a", "stride_b", "gate_stride_a", "gate_stride_b")
# Width, weighted, grouped, zero-centred, gate, type of x.
FORMS: tuple[tuple[int, bool, bool, bool, int, str], ...] = (
    (4096, True, False, False, NO_GATE.value, "bf16"),
    (5120, True, False, True, NO_GATE.value, "bf16"),
    (1536, True, False, False, NO_GATE.value, "bf16"),
    (512, True, False, False, NO_GATE.value, "bf16"),
    (512, False, False, False, NO_GATE.value, "bf16"),
    (256, True, False, True, NO_GATE.value, "bf16"),
    (2560, True, True, True, NO_GATE.value, "fp32"),
    (128, True, False, False, SILU_GATE.value, "fp32"),
    (128, True, False, False, SIGMOID_GATE.value, "fp32"),
)


def variants(target: int) -> Iterator[Variant]:
    """The same for every target."""
    for width, weighted, grouped, zero_centred, gate, kind in FORMS:
        pointers = {"x": f"*{kind}", "weight": "*bf16", "gate": "*bf16", "out": "*bf16"}
        arguments = pointers | dict.fromkeys(SIZES, "i32") | {"eps": "fp32"}
        sizes = launch.constants(width)
        flags = {"WEIGHTED": weighted, "GROUPED": grouped, "ZERO_CENTRED": zero_centred}
        values: dict[str, int | bool] = {**sizes, **flags, "GATE": gate}
        aligned = frozenset(arguments) - {"AB", "B", "eps"}
        label = (
            f"rms_norm {width} {kind}{' grouped' if grouped else ''}{f' gate {gate}' * (gate > 0)}"
        )
        yield Variant(label, rms_norm, arguments, values, aligned, launch.warps(sizes), 3)
