"""The variants of the selection kernel that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.top_k import launch
from kernels.top_k.triton import (
    COLUMN,
    COMPLETE,
    COUNT,
    COVER,
    MEMBER,
    NAMED,
    NUMBERS,
    PART,
    TOKENS,
    select,
)

OUT_TYPES = {NUMBERS: "*i64", TOKENS: "*i64", PART: "*i32"}
NAME_TYPES = {COLUMN: "*fp32", NAMED: "*i32", MEMBER: "*i64"}
KEPT = 512


def variants(target: int) -> Iterator[Variant]:
    """Entries, pools and blocks, in rows of one program, and of several."""
    for block in (*launch.BLOCKS, launch.FEW_BLOCK):
        yield _variant(block, COUNT, 1, COLUMN, NUMBERS)
        yield _variant(block, COMPLETE, 4, COLUMN, TOKENS)
    for block in (launch.BLOCKS[-1], launch.FEW_BLOCK):
        yield _variant(block, COUNT, 1, COLUMN, PART)
        yield _variant(block, COUNT, 1, NAMED, NUMBERS)
    yield _variant(launch.FEW_BLOCK, COMPLETE, 4, NAMED, TOKENS)
    yield _variant(launch.BLOCKS[-1], COVER, 8, COLUMN, NUMBERS, 2048)
    yield _variant(launch.BLOCKS[-1], COUNT, 8, MEMBER, NUMBERS)


def _variant(
    block: tuple[int, int], length: int, unit: int, names: int, out: int, k: int = KEPT
) -> Variant:
    arguments = {
        "scores": "*fp32", "lengths": "*i64", "names": NAME_TYPES[names], "out": OUT_TYPES[out],
        "out_scores": "*fp32", "N": "i32", "K": "i32", "blocks": "i32",
    }  # fmt: skip
    # As `launch.Rows` are made: only entries of named blocks must have their scores read.
    constants = launch.constants(length, unit, k, names, out, block, whole=names != MEMBER)
    return Variant(
        f"top_k {block[0]} of length {length}/{unit} names {names} out {out}", select, arguments,
        constants, frozenset(arguments) - {"K", "blocks"}, block[1], launch.STAGES,
    )  # fmt: skip
