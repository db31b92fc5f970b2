"""The variants of the quantised linear kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.aot.variant import Variant
from kernels.quant_linear import launch, tuning
from kernels.quant_linear.decode import FP8, INT4, MXFP4
from kernels.quant_linear.launch import Layout
from kernels.quant_linear.triton import matrix_matrix, matrix_vector

# Whole tiles of any configuration: served matrices have such widths.
ROW_BYTES = 4096
TRITON_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8",
    torch.int32: "i32",
}  # fmt: skip


def _layout(
    code: int, name: str, scale: torch.dtype, group: int, block_n: int, zero: bool
) -> Layout:
    zeros = torch.empty(0, dtype=torch.uint8) if zero else None
    return Layout(code, name, torch.empty(0, dtype=scale), zeros, group, block_n, ROW_BYTES)


# The stored formats of the served checkpoints, after `prepare`.
LAYOUTS = (
    _layout(FP8, "fp8", torch.float32, 128, 128, zero=False),
    _layout(FP8, "fp8", torch.float32, 32, 32, zero=False),
    _layout(INT4, "int4", torch.bfloat16, 64, 1, zero=False),
    _layout(INT4, "int4", torch.bfloat16, 64, 1, zero=True),
    _layout(INT4, "int4", torch.float16, 64, 1, zero=True),
    _layout(INT4, "int4", torch.bfloat16, 16, 1, zero=False),
    _layout(INT4, "int4", torch.bfloat16, 16, 1, zero=True),
    _layout(MXFP4, "mxfp4", torch.uint8, 16, 1, zero=False),
)


def variants(target: int) -> Iterator[Variant]:
    """Every tuned configuration of `target` with every stored format that it applies to."""
    for row in tuning.rows_for(target):
        for layout in LAYOUTS:
            if layout.name == row.weights:
                yield variant(layout, row.config)


def stored_types(layout: Layout) -> tuple[str, str]:
    """Element types of scales and of zero points as a kernel takes them."""
    scale, zero = (TRITON_TYPES[tensor.dtype] for tensor in layout.tensors)
    return scale, zero


def variant(layout: Layout, config: tuning.Config) -> Variant:
    vector = config.kernel == "vector"
    kernel = matrix_vector if vector else matrix_matrix
    constants = launch.vector_constants if vector else launch.matrix_constants
    scale, zero = stored_types(layout)
    partial, counters = ("fp32", "i32") if config.split > 1 else ("bf16", "bf16")
    pointers = {
        "x": "bf16",
        "words": "i32",
        "scales": scale,
        "zeros": zero,
        "y": "bf16",
        "partial": partial,
        "counters": counters,
    }
    sizes = ("N", "K") if vector else ("M", "N", "K")
    arguments = {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(sizes, "i32")
    values = constants(layout, config)
    label = f"{layout.name} {_tile(config)} {'zero ' if layout.zero is not None else ''}scale"
    return Variant(
        f"{label} {TRITON_TYPES[layout.scale.dtype]}/{layout.group_bytes}B", kernel, arguments,
        values, frozenset(arguments) - {"M"}, config.warps, config.stages,
    )  # fmt: skip


def _tile(config: tuning.Config) -> str:
    return (
        f"{config.kernel} {config.block_m}x{config.block_n}x{config.block_bytes}B "
        f"w{config.warps} s{config.stages} k{config.split}"
    )
