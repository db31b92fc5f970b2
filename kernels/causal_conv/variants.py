"""The variants of the convolution that servers launch: delta nets and the n-gram layer."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.causal_conv import launch, triton

TAPS = 4
DILATIONS = (1, 3)
# Rows of a window and delays of the row numbers that are made once in a pass.
HISTORIES = ((3, 4), (9, 4), (9, 10))
TOKENS = (1, 8192)
ROWS = dict.fromkeys(("x", "pool"), "*bf16")
PLACES = dict.fromkeys(("sequence_of", "offset_of", "read_slot"), "*i64")
WRITES = dict.fromkeys(("write_token", "write_sequence", "write_slot"), "*i64")


def variants(target: int) -> Iterator[Variant]:
    """The same for every target."""
    for window, delays in HISTORIES:
        pointers = dict.fromkeys(("token", "sequence", "offset", "rows"), "*i64")
        arguments = pointers | dict.fromkeys(("N", "windows", "first_delay", "step"), "i32")
        yield Variant(
            f"history_rows {window} {delays}", triton.history_rows, arguments,
            launch.history_constants(window, delays), frozenset(pointers), launch.WARPS,
            launch.STAGES,
        )  # fmt: skip
    for tokens in TOKENS:
        values = {"J": TAPS} | launch.tile(tokens)
        gathered = {"history": "*bf16", "rows": "*i64", "weight": "*bf16", "out": "*bf16"}
        yield _variant(
            f"conv_rows {tokens}", triton.conv_rows, gathered, ("T", "R"), ("C",), values
        )
        for dilation in DILATIONS:
            pointers = ROWS | {"weight": "*bf16", "out": "*bf16"} | PLACES
            name = f"conv_packed {tokens} dilation {dilation}"
            yield _variant(
                name, triton.conv_packed, pointers, ("T", "B", "slots"), ("C", "x_token"),
                {"J": TAPS, "D": dilation} | launch.packed_tile(tokens),
            )  # fmt: skip
    for dilation in DILATIONS:
        window = (TAPS - 1) * dilation
        pointers = ROWS | {name: PLACES[name] for name in ("offset_of", "read_slot")} | WRITES
        yield _variant(
            f"write_windows {window}", triton.write_windows, pointers, ("T", "W", "slots"),
            ("C", "x_token"), launch.window_tile(window),
        )  # fmt: skip


def _variant(
    name: str,
    kernel: object,
    pointers: dict[str, str],
    numbers: tuple[str, ...],
    widths: tuple[str, ...],
    constants: dict[str, int],
) -> Variant:
    arguments = pointers | dict.fromkeys((*numbers, *widths), "i32")
    values: dict[str, int | bool] = {**constants}
    aligned = frozenset(pointers) | frozenset(widths)
    return Variant(name, kernel, arguments, values, aligned, launch.WARPS, launch.STAGES)
