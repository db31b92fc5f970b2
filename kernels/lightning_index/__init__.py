"""Lightning indexer: scores of compressed entries and the best of them per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import backend
from kernels.cache_rows import RowFormat
from kernels.lightning_index import reference

# Legend: T packed tokens, B sequences, P pages of a table, N entries of a page, H index heads,
# D index head dim, S = top_k, C candidate blocks of a token (top_blocks).


@dataclass(frozen=True, slots=True)
class Candidates:
    """Blocks of `size` consecutive entries that a token's selection is limited to.

    `blocks_TC` int64 [T, C], -1 where a token has fewer.
    """

    blocks_TC: torch.Tensor
    size: int


def select_entries(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    pool_PND: torch.Tensor,
    pages_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    visible_T: torch.Tensor,
    *,
    top_k: int,
    candidates: Candidates | None = None,
    form: RowFormat | None = None,
) -> torch.Tensor:
    """The best entries of each token: int64 [T, top_k], ascending, -1 behind the last.

    score(g) = sum_h weights[h] relu(q[h] . key_g) over the entries g < visible_T[t] (int64 [T])
    of the token's sequence, and of its `candidates` where given; the `top_k` largest are taken,
    the lower entry among equals. All of them where there are no more than `top_k`. q of any float
    type, weights fp32 with every factor in them, key g at entry g % N of page
    `pages[b, g // N]` of `pool` [pages, N, D]; with `form` the pool is uint8 and its rows are
    stored as `kernels.cache_rows` defines. fp32 inside; on a GPU q and keys are rounded to bf16
    first, a power of two of entries makes a page, and where entries are scored, one whose page
    does not exist is never taken. Source: lightning indexer of DeepSeek-V4.
    """
    assert weights_TH.shape == q_THD.shape[:2] and top_k >= 1
    assert weights_TH.dtype == torch.float32
    if backend.uses_triton(q_THD):
        from kernels.lightning_index import launch

        queries = launch.Queries(q_THD.contiguous(), weights_TH, sequence_T, visible_T)
        stored = launch.Keys(pool_PND, pages_BP, form)
        return launch.select_entries(queries, stored, top_k, candidates)
    keys = reference.Keys(pool_PND, pages_BP, form)
    return reference.select_entries(
        q_THD, weights_TH, keys, sequence_T, visible_T, top_k, candidates
    )


def select_candidates(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    pool_PND: torch.Tensor,
    pages_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    visible_T: torch.Tensor,
    *,
    size: int,
    top_blocks: int,
    form: RowFormat | None = None,
) -> Candidates:
    """The best blocks of `size` entries of each token, ascending, -1 behind the last.

    A block scores as the best of its visible entries (scores as in `select_entries`); the block
    of the newest visible entry always belongs to the `top_blocks`; among equals the lower.
    Source: candidate source of DeepSeek-V4.1.
    """
    assert weights_TH.shape == q_THD.shape[:2] and top_blocks >= 1 and size >= 1
    if backend.uses_triton(q_THD):
        from kernels.lightning_index import launch

        queries = launch.Queries(q_THD.contiguous(), weights_TH, sequence_T, visible_T)
        stored = launch.Keys(pool_PND, pages_BP, form)
        return Candidates(launch.select_blocks(queries, stored, size, top_blocks), size)
    keys = reference.Keys(pool_PND, pages_BP, form)
    blocks_TC = reference.select_blocks(
        q_THD, weights_TH, keys, sequence_T, visible_T, size, top_blocks
    )
    return Candidates(blocks_TC, size)
