"""Launches of the Triton kernels: scores of a chunk of tokens, then the best blocks of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.paged_attention.launch import Place
from kernels.qsa_index.triton import mean_rows, score_blocks
from kernels.top_k.launch import Maxima, maxima_for, top_pools

SCORE_BYTES = 64 * 2**20  # of a chunk's scores, which stay in the larger caches
MEAN_ELEMENTS, MEAN_WARPS = 1024, 4
STAGES = 1


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens of a program and of a product, block keys of a program."""

    tokens: int
    step: int
    keys: int
    warps: int
    stages: int


FEW, MANY, PLAIN = Tile(16, 4, 64, 4, 1), Tile(128, 16, 128, 4, 2), Tile(16, 4, 32, 4, 1)
LEAST_COLUMNS = 16  # of a product


def tile_for(each: int, *, exact: bool) -> Tile:
    """The tile where a sequence has `each` tokens in the step on average; fp32 has a small one."""
    return PLAIN if exact else FEW if each <= FEW.tokens else MANY


def select_tokens(
    q_THD: torch.Tensor, pool_PND: torch.Tensor, place: Place, ratio: int, budget: int
) -> torch.Tensor:
    """See the package: int64 [T, budget + ratio - 1]. No host synchronisation; can be captured.

    The table's columns bound the blocks of a sequence, and the scores that are kept: tokens go in
    chunks whose scores take at most SCORE_BYTES, or one token's.
    """
    tokens = len(q_THD)
    place.check(tokens)
    chunk = max(1, SCORE_BYTES // (4 * columns_of(pool_PND, place)))
    parts = []
    for first in range(0, tokens, chunk):
        rows = range(first, min(first + chunk, tokens))
        scores, maxima = scores_of(q_THD, pool_PND, place, rows, ratio, budget // ratio)
        positions = place.positions_T[rows.start : rows.stop]
        parts.append(top_pools(scores, positions, ratio, budget, maxima=maxima))
    if not parts:
        return torch.empty(0, budget + ratio - 1, dtype=torch.int64, device=q_THD.device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def columns_of(pool_PND: torch.Tensor, place: Place) -> int:
    """Blocks that a sequence can have."""
    return max(1, place.page_table_BP.shape[1] * pool_PND.shape[1])


def scores_of(
    q_THD: torch.Tensor, pool_PND: torch.Tensor, place: Place, rows: range, ratio: int, kept: int
) -> tuple[torch.Tensor, Maxima | None]:
    """fp32 [len(rows), blocks] of the tokens `rows`, filled where they have more than `kept`, and
    the bests of groups of them if the selection wants those.
    """
    tokens, _, width = q_THD.shape
    assert q_THD.is_contiguous() and pool_PND.is_contiguous() and pool_PND.shape[2] == width
    assert width >= 16 and width & (width - 1) == 0, "a head dim is a power of two from 16"
    columns = columns_of(pool_PND, place)
    scores = torch.empty(len(rows), columns, dtype=torch.float32, device=q_THD.device)
    each = -(-tokens // max(len(place.page_table_BP), 1))
    tile = tile_for(each, exact=not _plain(q_THD, pool_PND))
    per_tile = min(each, tile.tokens)
    maxima = maxima_for(scores, kept, tile.keys) if tile != MANY else None
    score_blocks[(-(-len(rows) // per_tile), -(-columns // tile.keys))](
        q_THD, pool_PND, scores, place.positions_T if maxima is None else maxima.keys_TW,
        place.page_table_BP, place.sequence_T, place.positions_T,
        rows.stop, rows.start, per_tile, kept, columns,
        0 if maxima is None else maxima.keys_TW.shape[1], *place.sizes(pool_PND), width**-0.5,
        **constants(q_THD, pool_PND, tile, ratio, 0 if maxima is None else maxima.size),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return scores, maxima


def _plain(q_THD: torch.Tensor, pool_PND: torch.Tensor) -> bool:
    """Whether products in bf16 are exact."""
    return q_THD.dtype == pool_PND.dtype == torch.bfloat16


def constants(
    q_THD: torch.Tensor, pool_PND: torch.Tensor, tile: Tile, ratio: int, best: int
) -> dict[str, int | bool]:
    """The kernel's constants: products of bf16 are exact in bf16, others are taken in fp32."""
    _, heads, width = q_THD.shape
    exact = not _plain(q_THD, pool_PND)
    padded = 1 << (heads - 1).bit_length()
    return {
        "D": width,
        "H": heads,
        "HP": padded,
        "M": tile.tokens,
        "BT": max(tile.step, LEAST_COLUMNS // padded),
        "BK": tile.keys,
        "RATIO": ratio,
        "EXACT": exact,
        "BEST": best,
        "STAGES": tile.stages,
    }


def mean_of_blocks(keys_TRD: torch.Tensor) -> torch.Tensor:
    """[T, D] of the type of the keys, in one launch."""
    tokens, count, width = keys_TRD.shape
    out_TD = torch.empty(tokens, width, dtype=keys_TRD.dtype, device=keys_TRD.device)
    if out_TD.numel() == 0:
        return out_TD
    mean_rows[(-(-out_TD.numel() // MEAN_ELEMENTS),)](
        keys_TRD.contiguous(), out_TD, out_TD.numel(), R=count, D=width, BX=MEAN_ELEMENTS,
        num_warps=MEAN_WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out_TD
