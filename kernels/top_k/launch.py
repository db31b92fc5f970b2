"""Launches of the selection: one program a row, and one before it where few rows are long."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import backend
from kernels.top_k.triton import (
    COLUMN,
    COMPLETE,
    COUNT,
    GIVEN,
    MEMBER,
    NONE,
    NUMBERS,
    OWN,
    TOKENS,
    best_of_groups,
    select,
)

MOST_KEPT = 2048
MOST_HELD = 32768  # keys of a program: 64 registers a thread
# Shorter rows have no groups; of up to FEW_ROWS rows several programs find the bests of a row.
FEW_ROWS, DIRECT_FEW, DIRECT_MANY = 64, 8192, 2048
ALIGNED = 16  # groups, and columns of rows of scores, are rows of a multiple of so many
STREAMED = 4096  # columns of which a program finds the bests of groups at a time
STREAM_WARPS, STREAM_STAGES = 8, 2
STAGES = 1
# Registers of a thread by warps where rows are many, so that more of them are at work at a time.
MANY_REGISTERS = {4: 96, 8: 80}


@dataclass(frozen=True, slots=True)
class Rows:
    """Which columns compete: LENGTH and UNIT of the kernel, and the number of each row."""

    numbers_T: torch.Tensor
    length: int = COUNT
    unit: int = 1
    blocks_TC: torch.Tensor | None = None  # columns are the members of these blocks of `unit`
    whole: bool = False

    def part(self, now: slice) -> Rows:
        """Some of the rows."""
        blocks = None if self.blocks_TC is None else self.blocks_TC[now]
        return Rows(self.numbers_T[now], self.length, self.unit, blocks, self.whole)


@dataclass(frozen=True, slots=True)
class Groups:
    """`size` consecutive columns a group, 0 for none, of which `chosen` are looked into."""

    size: int
    chosen: int

    def of(self, columns: int) -> int:
        """Groups of a row in memory."""
        return -(-columns // (self.size * ALIGNED)) * ALIGNED


@dataclass(frozen=True, slots=True)
class Maxima:
    """Keys int32 [T, W] of the bests of groups of `size` columns, to be filled by who scores."""

    keys_TW: torch.Tensor
    size: int


def padded(value: int) -> int:
    """The least power of two that is not below `value` >= 1."""
    return 1 << (value - 1).bit_length()


def groups_of(rows: int, columns: int, k: int) -> Groups:
    """The groups of a selection. The bests of all and the columns of those that are chosen are
    about as many.
    """
    if columns <= (DIRECT_FEW if rows <= FEW_ROWS else DIRECT_MANY):
        return Groups(0, 0)
    chosen, size = padded(k), 2
    while padded(-(-columns // size)) > chosen * size:
        size *= 2
    return Groups(size, chosen)


def maxima_for(scores_TN: torch.Tensor, k: int, most: int) -> Maxima | None:
    """Room for the bests of the groups, where the selection of `k` has groups of up to `most`
    columns and would spend a launch on them.
    """
    tokens, columns = scores_TN.shape
    groups = groups_of(tokens, columns, k)
    if tokens > FEW_ROWS or not 0 < groups.size <= most:
        return None
    shape = (tokens, groups.of(columns))
    return Maxima(torch.empty(shape, dtype=torch.int32, device=scores_TN.device), groups.size)


def top_k(scores_TN: torch.Tensor, visible_T: torch.Tensor, k: int) -> torch.Tensor:
    """See the package. No host synchronisation; can be captured in a CUDA graph."""
    return numbers(scores_TN, Rows(visible_T), k)


def numbers(
    scores_TN: torch.Tensor,
    rows: Rows,
    k: int,
    out_TK: torch.Tensor | None = None,
    maxima: Maxima | None = None,
) -> torch.Tensor:
    """int64 [T, k] as `rows` names the columns. A row taken whole leaves its scores unread.

    `maxima`: as `maxima_for` gave them, filled. For groups that begin before a row's length.
    """
    if out_TK is None:
        out_TK = torch.empty(len(scores_TN), k, dtype=torch.int64, device=scores_TN.device)
    _select(scores_TN, rows, k, NUMBERS, out_TK, maxima)
    return out_TK


def top_pools(
    scores_TN: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
    budget: int,
    out_TS: torch.Tensor | None = None,
    maxima: Maxima | None = None,
) -> torch.Tensor:
    """See the package, and `numbers`. No host synchronisation; can be captured."""
    assert ratio & (ratio - 1) == 0, "a pool holds a power of two of tokens"
    if out_TS is None:
        shape = (len(scores_TN), budget + ratio - 1)
        out_TS = torch.empty(shape, dtype=torch.int64, device=scores_TN.device)
    rows = Rows(positions_T, COMPLETE, ratio, whole=True)
    _select(scores_TN, rows, budget // ratio, TOKENS, out_TS, maxima)
    return out_TS


def _select(
    scores_TN: torch.Tensor,
    rows: Rows,
    k: int,
    out: int,
    out_TX: torch.Tensor,
    maxima: Maxima | None,
) -> None:
    tokens, columns = scores_TN.shape
    assert scores_TN.is_contiguous() and out_TX.is_contiguous() and scores_TN.dtype == torch.float32
    assert 1 <= k <= MOST_KEPT and rows.numbers_T.shape == (tokens,)
    assert rows.numbers_T.is_contiguous() and columns * padded(k) <= MOST_HELD**2
    if tokens == 0:
        return
    groups = groups_of(tokens, columns, k)
    source, keys, chosen = NONE, scores_TN, out_TX  # in the place of what is not read
    if groups.size or out == TOKENS:
        chosen = torch.empty(tokens, padded(k), dtype=torch.int32, device=scores_TN.device)
    if groups.size:
        source, keys = _maxima_of(scores_TN, rows, k, groups, maxima)
    names, kind, blocks = scores_TN, COLUMN, 0
    if rows.blocks_TC is not None:
        assert rows.blocks_TC.is_contiguous() and rows.blocks_TC.shape[1] * rows.unit == columns
        names, kind, blocks = rows.blocks_TC, MEMBER, rows.blocks_TC.shape[1]
    values, warps = constants(columns, k, groups, source)
    select[(tokens,)](
        scores_TN, rows.numbers_T, names, keys, chosen, out_TX, columns, keys.shape[1], k,
        blocks, **values, **meaning(rows.length, rows.unit, whole=rows.whole), NAMES=kind,
        OUT=out, num_warps=warps, num_stages=STAGES,
        maxnreg=registers(tokens, warps),
    )  # fmt: skip


def _maxima_of(
    scores_TN: torch.Tensor, rows: Rows, k: int, groups: Groups, maxima: Maxima | None
) -> tuple[int, torch.Tensor]:
    """Where the selection finds the bests of groups; one launch if that is in `_bests`."""
    tokens, columns = scores_TN.shape
    shape = (tokens, groups.of(columns))
    if maxima is not None:
        assert maxima.size == groups.size and maxima.keys_TW.shape == shape
        assert maxima.keys_TW.is_contiguous() and maxima.keys_TW.dtype == torch.int32
        return GIVEN, maxima.keys_TW
    keys_TW = torch.empty(shape, dtype=torch.int32, device=scores_TN.device)
    if tokens > FEW_ROWS:
        return OWN, keys_TW
    _bests(scores_TN, rows, k, groups, keys_TW)
    return GIVEN, keys_TW


def _bests(
    scores_TN: torch.Tensor, rows: Rows, k: int, groups: Groups, keys_TW: torch.Tensor
) -> None:
    (tokens, columns), width = scores_TN.shape, keys_TW.shape[1]
    values = best_constants(groups)
    best_of_groups[(tokens, -(-width // values["R"]))](
        scores_TN, rows.numbers_T, keys_TW, columns, width, k, **values,
        **meaning(rows.length, rows.unit, whole=rows.whole), num_warps=STREAM_WARPS,
        num_stages=STAGES,
    )  # fmt: skip


def registers(tokens: int, warps: int) -> int | None:
    """Most of a thread of the selection; None for what the compiler likes."""
    return MANY_REGISTERS.get(warps) if tokens > FEW_ROWS else None


def best_constants(groups: Groups) -> dict[str, int | bool]:
    """The sizes of `best_of_groups`."""
    return {"G": groups.size, "R": max(1, STREAMED // groups.size)}


def meaning(length: int, unit: int, *, whole: bool) -> dict[str, int | bool]:
    """The kernels' constants that follow from which columns compete."""
    return {"LENGTH": length, "UNIT": unit, "WHOLE": whole}


def constants(
    columns: int, k: int, groups: Groups, source: int
) -> tuple[dict[str, int | bool], int]:
    """The kernel's sizes for rows of so many columns, and its warps."""
    size = max(1, groups.size)
    held = 1 if source == NONE else padded(groups.of(columns))
    candidates = padded(max(1, columns)) if source == NONE else groups.chosen * size
    sizes: dict[str, int | bool] = {
        "C": candidates, "G": size, "M": held, "S": max(1, groups.chosen),
        "R": max(1, STREAMED // size), "KP": padded(k), "MAXIMA": source,
        "STAGES": STREAM_STAGES, "PTX": not backend.interpreted(),
    }  # fmt: skip
    most = max(held, candidates)
    return sizes, 4 if most <= 2048 else 8 if most <= 8192 else 16
