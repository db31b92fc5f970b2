"""Launches of the indexer: scores of a chunk of tokens, then the selection among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels import backend
from kernels.cache_rows.decode import E2M1, E4M3, PLAIN
from kernels.lightning_index.triton import BLOCKS, ENTRIES, MEMBERS, scores
from kernels.top_k import launch as top_k
from kernels.top_k.triton import COUNT, COVER

if TYPE_CHECKING:
    from kernels.cache_rows import RowFormat
    from kernels.lightning_index import Candidates

FORMS = {"e4m3": E4M3, "e2m1": E2M1}
# Scores that are held at a time, bytes: more tokens are taken in turn.
SCRATCH_BYTES = 256 * 2**20
COLUMNS = 16  # rows of scores are so aligned
BLOCK_KEYS = 128
FEW_TOKENS = 32
# Tokens of a program, which decodes its keys once for all of them: one while there are no more
# programs than the cards hold at a time, and two sizes for up to FEW_TOKENS and for more.
HELD_PROGRAMS, SOME, BLOCK_TOKENS = 256, 8, 32
WARPS, STAGES = 4, 2


@dataclass(frozen=True, slots=True)
class Keys:
    """A pool [pages, per_page, row] and its table [B, P]; `scale` fp32 of each key, or None."""

    pool: torch.Tensor
    pages: torch.Tensor
    form: RowFormat | None = None
    scale: torch.Tensor | None = None

    @property
    def entries(self) -> int:
        """That a row of the table can name."""
        return self.pages.shape[1] * self.pool.shape[1]

    def constants(self, width: int) -> dict[str, int | bool]:
        """The kernel's constants that follow from how rows of `width` values are stored."""
        row, form = self.pool.shape[2], self.form
        scaled = self.scale is not None
        if form is None:
            kind = E4M3 if scaled else PLAIN
            return {"FORM": kind, "ROW": row, "GROUP": 0, "E8M0": True, "SCALED": scaled}
        assert form.plain == 0 and form.row_values(row) == width
        kind, e8m0 = FORMS[form.codes], form.scale == "ue8m0"
        return {"FORM": kind, "ROW": row, "GROUP": form.group, "E8M0": e8m0, "SCALED": False}


@dataclass(frozen=True, slots=True)
class Queries:
    """q [T, H, D], weights fp32 [T, H], the sequence of each token, and a number that bounds its
    entries: how many there are, or, `pooled` by a ratio, its position. Scores are times `factor`.
    """

    q_THD: torch.Tensor
    weights_TH: torch.Tensor
    sequence_T: torch.Tensor
    numbers_T: torch.Tensor
    factor: float = 1.0
    pooled: int = 0

    def part(self, first: int, stop: int) -> Queries:
        now = slice(first, stop)
        return Queries(
            self.q_THD[now], self.weights_TH[now], self.sequence_T[now], self.numbers_T[now],
            self.factor, self.pooled,
        )  # fmt: skip


def select_entries(
    queries: Queries, keys: Keys, top: int, candidates: Candidates | None
) -> torch.Tensor:
    """int64 [T, top]. No host synchronisation; can be captured in a CUDA graph."""
    out_TS = _numbers(queries, top)
    if candidates is None:
        rows = top_k.Rows(queries.numbers_T, whole=True)
        for now, part, held in _chunks(queries, keys.entries):
            maxima = _maxima_for(held, top)
            fill_scores(part, keys, held, least=top, maxima=maxima)
            top_k.numbers(held, rows.part(now), top, out_TS[now], maxima)
        return out_TS
    size = candidates.size
    rows = top_k.Rows(queries.numbers_T, COUNT, size, candidates.blocks_TC.contiguous())
    for now, part, held in _chunks(queries, candidates.blocks_TC.shape[1] * size, padded=False):
        chosen = rows.part(now)
        maxima = _maxima_for(held, top)
        fill_scores(part, keys, held, MEMBERS, size, blocks_TC=chosen.blocks_TC, maxima=maxima)
        top_k.numbers(held, chosen, top, out_TS[now], maxima)
    return out_TS


def select_blocks(queries: Queries, keys: Keys, size: int, top: int) -> torch.Tensor:
    """int64 [T, top]. No host synchronisation; can be captured in a CUDA graph."""
    out_TC = _numbers(queries, top)
    rows = top_k.Rows(queries.numbers_T, COVER, size, whole=True)
    for now, part, held in _chunks(queries, -(-keys.entries // size)):
        maxima = _maxima_for(held, top, size)
        fill_scores(part, keys, held, BLOCKS, size, least=top * size, maxima=maxima)
        top_k.numbers(held, rows.part(now), top, out_TC[now], maxima)
    return out_TC


def select_pools(queries: Queries, keys: Keys, budget: int) -> torch.Tensor:
    """int64 [T, budget + ratio - 1]. No host synchronisation; can be captured in a CUDA graph."""
    ratio = queries.pooled
    out_TS = _numbers(queries, budget + ratio - 1)
    for now, part, held in _chunks(queries, keys.entries):
        maxima = _maxima_for(held, budget // ratio)
        fill_scores(part, keys, held, unit=ratio, least=budget // ratio, maxima=maxima)
        top_k.top_pools(held, part.numbers_T, ratio, budget, out_TS[now], maxima)
    return out_TS


def _maxima_for(held_TN: torch.Tensor, top: int, size: int = 1) -> top_k.Maxima | None:
    """Room for what `fill_scores` finds on its way where a program takes one token."""
    if len(held_TN) > FEW_TOKENS:
        return None
    return top_k.maxima_for(held_TN, top, BLOCK_KEYS // size)


def fill_scores(
    queries: Queries,
    keys: Keys,
    out_TN: torch.Tensor,
    mode: int = ENTRIES,
    unit: int = 1,
    *,
    least: int = -1,
    blocks_TC: torch.Tensor | None = None,
    maxima: top_k.Maxima | None = None,
) -> None:
    """Fill `out` fp32 [T, N] as the kernel documents; q and keys are rounded to bf16."""
    q_THD, (tokens, columns) = queries.q_THD, out_TN.shape
    _, heads, width = q_THD.shape
    per_page = keys.pool.shape[1]
    assert q_THD.is_contiguous() and queries.weights_TH.is_contiguous() and out_TN.is_contiguous()
    assert keys.pool.is_contiguous() and keys.pages.is_contiguous() and q_THD.shape[0] == tokens
    assert width >= 16 and width & (width - 1) == 0 and per_page & (per_page - 1) == 0
    assert unit & (unit - 1) == 0 and unit <= BLOCK_KEYS
    if tokens == 0 or columns == 0:
        return
    best, width_of_maxima = (0, 0) if maxima is None else (maxima.size, maxima.keys_TW.shape[1])
    stored, pooled = keys.constants(width), queries.pooled > 0
    tiles = -(-(columns * unit if mode == BLOCKS else columns) // BLOCK_KEYS)
    each = tokens_of_program(tokens, tiles, mode)
    values = constants(stored, width, heads, each, mode, unit, best, pooled=pooled)
    grid = (tiles, -(-tokens // each))
    scores[grid](
        q_THD, queries.weights_TH, keys.pool, out_TN if keys.scale is None else keys.scale,
        keys.pages, queries.sequence_T, queries.numbers_T,
        queries.sequence_T if blocks_TC is None else blocks_TC, out_TN,
        queries.sequence_T if maxima is None else maxima.keys_TW, tokens, heads, columns,
        width_of_maxima, 0 if blocks_TC is None else blocks_TC.shape[1],
        *keys.pages.shape, keys.pool.shape[0], per_page.bit_length() - 1, least, queries.factor,
        **values, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def tokens_of_program(tokens: int, tiles: int, mode: int) -> int:
    """How many tokens a program takes, of a row of `tiles` programs; changes no score."""
    if mode == MEMBERS or tokens * tiles <= HELD_PROGRAMS:
        return 1
    return SOME if tokens <= FEW_TOKENS else BLOCK_TOKENS


def constants(
    stored: dict[str, int | bool],
    width: int,
    heads: int,
    each: int,
    mode: int,
    unit: int,
    best: int,
    *,
    pooled: bool,
) -> dict[str, int | bool]:
    """The kernel's constants, of programs with `each` tokens."""
    return stored | {
        "D": width,
        "HB": max(16, 1 << (heads - 1).bit_length()),
        "MODE": mode,
        "UNIT": unit,
        "POOLED": pooled,
        "BT": each,
        "BK": BLOCK_KEYS,
        "BEST": best,
        "STAGES": 1 if each == 1 else STAGES,
        "PTX": not backend.interpreted(),
    }


def _numbers(queries: Queries, columns: int) -> torch.Tensor:
    q_THD = queries.q_THD
    return torch.empty(len(q_THD), columns, dtype=torch.int64, device=q_THD.device)


def _chunks(
    queries: Queries, columns: int, *, padded: bool = True
) -> Iterator[tuple[slice, Queries, torch.Tensor]]:
    """Slices of tokens, their queries, and fp32 rows of at least `columns` for their scores."""
    tokens, device = len(queries.q_THD), queries.q_THD.device
    width = -(-columns // COLUMNS) * COLUMNS if padded else columns
    step = max(1, SCRATCH_BYTES // (4 * max(width, 1)))
    held = torch.empty(min(tokens, step), width, dtype=torch.float32, device=device)
    for first in range(0, tokens, step):
        stop = min(first + step, tokens)
        yield slice(first, stop), queries.part(first, stop), held[: stop - first]
