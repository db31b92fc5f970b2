"""The variants of the row kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.cache_rows import (
    COMPRESSED_ROWS,
    INDEX_ROWS,
    WINDOW_ROWS,
    RowFormat,
    latent_rows,
    launch,
)
from kernels.cache_rows.triton import decode, encode

ROWS: tuple[tuple[str, RowFormat, int], ...] = (
    ("window", WINDOW_ROWS, 512),
    ("compressed", COMPRESSED_ROWS, 512),
    ("index", INDEX_ROWS, 128),
    ("latent", latent_rows(512, 64), 512),
)


def variants(target: int) -> Iterator[Variant]:
    """Every stored row of the served models, there and back."""
    for name, form, width in ROWS:
        tail = "*bf16" if form.plain else "*u8"
        values = launch.constants(width, form) | {"R": launch.rows_of_program(width)}
        there = {"x": "*bf16", "out": "*u8", "out_tail": tail, "N": "i32"}
        back = {"rows": "*u8", "rows_tail": tail, "out": "*fp32", "N": "i32"}
        for kernel, arguments in ((encode, there), (decode, back)):
            yield Variant(
                f"{kernel.fn.__name__} {name}", kernel, arguments, values,
                frozenset(arguments) - {"N"}, launch.WARPS, launch.STAGES,
            )  # fmt: skip
