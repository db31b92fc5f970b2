"""Launches of the selection: one program a row, or one a segment and then one a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.top_k.triton import (
    COLUMN,
    COMPLETE,
    COUNT,
    MEMBER,
    NAMED,
    NUMBERS,
    PART,
    TOKENS,
    select,
)

MOST_KEPT = 2048
# Columns whose keys a program holds, and its warps: 16, 32 or 64 registers a thread.
BLOCKS = ((2048, 4), (8192, 8), (32768, 16))
# Of few rows and few numbers, so that several programs share a row.
FEW_ROWS, FEW_KEPT, FEW_BLOCK = 32, 512, (4096, 8)
# Columns of a thread that are written out together, or in chunks of fewer where there are more.
MOST_AT_ONCE, CHUNK = 16, 8
STAGES = 1


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


def block_of(rows: int, columns: int, k: int) -> tuple[int, int]:
    """Columns and warps of a program for so many rows of `columns`."""
    blocks = (BLOCKS[0], FEW_BLOCK) if rows <= FEW_ROWS and k <= FEW_KEPT else BLOCKS
    return next((block for block in blocks if block[0] >= columns), blocks[-1])


def top_k(scores_TN: torch.Tensor, visible_T: torch.Tensor, k: int) -> torch.Tensor:
    """See the package. No host synchronisation; can be captured in a CUDA graph."""
    return numbers(scores_TN, Rows(visible_T), k)


def numbers(
    scores_TN: torch.Tensor, rows: Rows, k: int, out_TK: torch.Tensor | None = None
) -> torch.Tensor:
    """int64 [T, k] as `rows` names the columns. A row taken whole leaves its scores unread."""
    if out_TK is None:
        out_TK = torch.empty(len(scores_TN), k, dtype=torch.int64, device=scores_TN.device)
    _select(scores_TN, rows, k, NUMBERS, out_TK)
    return out_TK


def top_pools(
    scores_TN: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
    budget: int,
    out_TS: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the package. No host synchronisation; can be captured in a CUDA graph."""
    assert ratio & (ratio - 1) == 0, "a pool holds a power of two of tokens"
    if out_TS is None:
        shape = (len(scores_TN), budget + ratio - 1)
        out_TS = torch.empty(shape, dtype=torch.int64, device=scores_TN.device)
    rows = Rows(positions_T, COMPLETE, ratio, whole=True)
    _select(scores_TN, rows, budget // ratio, TOKENS, out_TS)
    return out_TS


def _select(scores_TN: torch.Tensor, rows: Rows, k: int, out: int, out_TX: torch.Tensor) -> None:
    tokens, columns = scores_TN.shape
    assert scores_TN.is_contiguous() and out_TX.is_contiguous() and scores_TN.dtype == torch.float32
    assert 1 <= k <= MOST_KEPT and rows.numbers_T.shape == (tokens,)
    assert rows.numbers_T.is_contiguous() and columns < 2**31
    if tokens == 0:
        return
    names = None
    block, warps = block_of(tokens, columns, k)
    while columns > block:
        shape = (tokens, -(-columns // block) * k)
        part_names = torch.empty(shape, dtype=torch.int32, device=scores_TN.device)
        part_scores = torch.empty(shape, dtype=torch.float32, device=scores_TN.device)
        _launch(scores_TN, rows, names, k, PART, part_names, part_scores, block, warps)
        scores_TN, names, columns = part_scores, part_names, shape[1]
        block, warps = block_of(tokens, columns, k)
    _launch(scores_TN, rows, names, k, out, out_TX, scores_TN, block, warps)


def _launch(
    scores_TN: torch.Tensor,
    rows: Rows,
    names_TN: torch.Tensor | None,
    k: int,
    out: int,
    out_TX: torch.Tensor,
    out_scores: torch.Tensor,
    block: int,
    warps: int,
) -> None:
    tokens, columns = scores_TN.shape
    names, kind, blocks = scores_TN, COLUMN, 0
    if names_TN is not None:
        names, kind = names_TN, NAMED
    elif rows.blocks_TC is not None:
        assert rows.blocks_TC.is_contiguous() and rows.blocks_TC.shape[1] * rows.unit == columns
        names, kind, blocks = rows.blocks_TC, MEMBER, rows.blocks_TC.shape[1]
    select[(tokens, max(1, -(-columns // block)))](
        scores_TN, rows.numbers_T, names, out_TX, out_scores, columns, k, blocks,
        **constants(rows.length, rows.unit, k, kind, out, (block, warps), whole=rows.whole),
        num_warps=warps, num_stages=STAGES,
    )  # fmt: skip


def constants(
    length: int, unit: int, k: int, names: int, out: int, block: tuple[int, int], *, whole: bool
) -> dict[str, int | bool]:
    """The kernel's constants for a block of columns and its warps."""
    threads = 32 * block[1]
    return {
        "BLOCK": block[0],
        "CHUNK": block[0] if block[0] <= MOST_AT_ONCE * threads else CHUNK * threads,
        "KP": 1 << (k - 1).bit_length(),
        "LENGTH": length,
        "UNIT": unit,
        "NAMES": names,
        "OUT": out,
        "WHOLE": whole and names != NAMED,
    }
