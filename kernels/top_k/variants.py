"""The variants of the selection's kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.top_k import launch
from kernels.top_k.triton import (
    COLUMN,
    COMPLETE,
    COUNT,
    COVER,
    GIVEN,
    MEMBER,
    NONE,
    NUMBERS,
    OWN,
    TOKENS,
    best_of_groups,
    select,
)

KEPT, FEW, MANY = 512, 1, 1024
POINTERS = {"scores": "*fp32", "lengths": "*i64", "maxima": "*i32", "chosen": "*i32"}
ALIGNED = frozenset((*POINTERS, "names", "out", "N", "W"))


def variants(target: int) -> Iterator[Variant]:
    """Entries, pools and blocks, in rows of several lengths, few of them and many."""
    for rows, columns in ((FEW, 8192), (FEW, 32768), (FEW, 262144), (MANY, 8192), (MANY, 32768)):
        yield _variant(rows, columns, COUNT, 1, COLUMN, NUMBERS)
        yield _variant(rows, columns, COMPLETE, 4, COLUMN, TOKENS)
    yield _variant(FEW, 65536, COVER, 8, COLUMN, NUMBERS, 2048)
    yield _variant(FEW, 16384, COUNT, 8, MEMBER, NUMBERS)
    yield _bests(32768, COUNT, 1)
    yield _bests(262144, COUNT, 1)
    yield _bests(32768, COMPLETE, 4)


def _variant(
    rows: int, columns: int, length: int, unit: int, names: int, out: int, k: int = KEPT
) -> Variant:
    groups = launch.groups_of(rows, columns, k)
    source = NONE if groups.size == 0 else GIVEN if rows <= launch.FEW_ROWS else OWN
    values, warps = launch.constants(columns, k, groups, source)
    whole = names != MEMBER  # as `Rows` are made: members of named blocks must be read
    constants = values | launch.meaning(length, unit, whole=whole)
    constants |= {"NAMES": names, "OUT": out}
    kinds = POINTERS | {"names": "*i64" if names == MEMBER else "*fp32", "out": "*i64"}
    if source == NONE:  # in the place of what is not read
        kinds |= {"maxima": "*fp32"} | ({"chosen": "*i64"} if out == NUMBERS else {})
    arguments = _arguments(select.arg_names, kinds, constants)
    label = f"{k} of {columns} T={rows} length {length}/{unit} names {names} out {out}"
    few = launch.registers(rows, warps)
    return Variant(label, select, arguments, constants, ALIGNED, warps, launch.STAGES, few)


def _bests(columns: int, length: int, unit: int) -> Variant:
    groups = launch.groups_of(FEW, columns, KEPT)
    constants = launch.best_constants(groups) | launch.meaning(length, unit, whole=True)
    arguments = _arguments(best_of_groups.arg_names, POINTERS, constants)
    label = f"best of {groups.size} length {length}/{unit}"
    return Variant(
        label, best_of_groups, arguments, constants, ALIGNED, launch.STREAM_WARPS, launch.STAGES
    )


def _arguments(
    names: list[str], kinds: dict[str, str], constants: dict[str, int | bool]
) -> dict[str, str]:
    return {name: kinds.get(name, "i32") for name in names if name not in constants}
