"""The variants of the paged attention kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.paged_attention import configs, launch
from kernels.paged_attention.triton import (
    attend_rows,
    paged_attention,
    resolve_rows,
    write_rows,
)
from kernels.split_keys.variant import merge_variant

WIDTH = 256
INTEGERS = ("table", "sequence_of", "position_of", "selected")
STRIDES = ("gate_token", "gate_head")
# Rows of a tile: 27B has 6 query heads a key head, Flash-Next 12.
DECODE, VERIFY = 12, 24


def variants(target: int) -> Iterator[Variant]:
    """Decode, verification and prefill, dense and over a selection, and writes to pages."""
    for splits in (64, 8):
        yield _variant(DECODE, splits, one=True)
        yield _variant(VERIFY, splits)
    for rows in {64, configs.MAX_ROWS[target]}:
        yield _variant(rows, 1)
    for splits in (64, 8):
        yield _variant(DECODE, splits, one=True, selected=True)
    yield _resolve_variant()
    yield _rows_variant(configs.rows_tile(target, DECODE))
    for splits in (64, 8):
        yield merge_variant(WIDTH, splits, sink=False, gated=True)
    for kind, elements in (("bf16", 1024), ("u8", 584)):
        yield write_variant(kind, elements)


def _variant(rows: int, splits: int, *, one: bool = False, selected: bool = False) -> Variant:
    config = configs.tile(rows, splits, one=one)
    pointers = dict.fromkeys(("q", "k_pool", "v_pool", "out", "gate"), "*bf16")
    pointers |= {"values": "*fp32", "stats": "*fp32", **dict.fromkeys(INTEGERS, "*i64")}
    constants = launch.constants(WIDTH, config, selected=selected, gated=True)
    names = [name for name in paged_attention.arg_names if name not in constants]
    arguments = {name: pointers.get(name, "i32") for name in names} | {"scale": "fp32"}
    label = f"{config.rows}x{config.keys} of {WIDTH} k{config.splits} w{config.warps}"
    return Variant(
        f"attention {label} s{config.stages}{' selected' if selected else ''}", paged_attention,
        arguments, constants, frozenset((*pointers, *STRIDES)), config.warps, config.stages,
    )  # fmt: skip


def _resolve_variant() -> Variant:
    pointers = dict.fromkeys(("selected", "table", "sequence_of", "position_of"), "*i64")
    pointers["rows"] = "*i32"
    sizes = dict.fromkeys(("slots", "padded", "sequences", "width", "pages", "shift"), "i32")
    return Variant(
        "resolve", resolve_rows, pointers | sizes, {"BX": launch.RESOLVED},
        frozenset((*pointers, "padded")), launch.RESOLVE_WARPS, launch.RESOLVE_STAGES,
    )  # fmt: skip


def _rows_variant(config: configs.Config) -> Variant:
    pointers = dict.fromkeys(("q", "k_pool", "v_pool", "out", "gate"), "*bf16")
    pointers |= {"position_of": "*i64", "rows": "*i32", "again": "*i32"}
    sizes = dict.fromkeys(("heads", "group", "padded", *STRIDES), "i32")
    return Variant(
        f"attention {config.rows}x{config.keys} of {WIDTH} w{config.warps} rows", attend_rows,
        pointers | sizes | {"scale": "fp32"}, launch.rows_constants(WIDTH, config, gated=True),
        frozenset((*pointers, "padded", *STRIDES)), config.warps, config.stages,
    )  # fmt: skip


def write_variant(kind: str, elements: int, ratio: int = 1) -> Variant:
    """Rows of `elements` stored as they are, of every token or of those that close `ratio`."""
    pointers = {"rows": f"*{kind}", "pool": f"*{kind}"}
    pointers |= dict.fromkeys(("table", "sequence_of", "position_of"), "*i64")
    sizes = dict.fromkeys(("X", "sequences", "width", "pages", "shift"), "i32")
    aligned = {*pointers, "X"} if elements % 16 == 0 else {*pointers}
    return Variant(
        f"write {kind} {elements} of {ratio}", write_rows, pointers | sizes,
        {"RATIO": ratio, "BX": launch.write_block(elements)}, frozenset(aligned),
        launch.WRITE_WARPS, launch.WRITE_STAGES,
    )  # fmt: skip
