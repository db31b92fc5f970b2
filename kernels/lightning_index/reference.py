from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.cache_rows import RowFormat, decode_rows

if TYPE_CHECKING:
    from kernels.lightning_index import Candidates


@dataclass(frozen=True, slots=True)
class Keys:
    """A pool of keys, the pages [B, P] of each sequence, and how rows are stored."""

    pool: torch.Tensor
    pages: torch.Tensor
    form: RowFormat | None

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """fp32 [N, D] of stored rows."""
        return rows.float() if self.form is None else decode_rows(rows, self.form)


# Entries scored at a time: bounds the [H, entries] scores of a long context.
ENTRY_TILE = 8192


def select_entries(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    keys: Keys,
    sequence_T: torch.Tensor,
    visible_T: torch.Tensor,
    top_k: int,
    candidates: Candidates | None,
) -> torch.Tensor:
    """Tokens whose entries all fit take every one; only the others score them."""
    order_S = torch.arange(top_k, device=q_THD.device)
    selected_TS = torch.where(order_S < visible_T[:, None], order_S, -1)
    sequences, counts = sequence_T.tolist(), visible_T.tolist()
    for t, (b, visible) in enumerate(zip(sequences, counts, strict=True)):
        if visible <= top_k and candidates is None:
            continue
        scores_N = entry_scores(q_THD[t].float(), weights_TH[t], keys, b, visible)
        if candidates is not None:
            allowed = allowed_entries(candidates.blocks_TC[t], candidates.size, visible)
            scores_N = scores_N.masked_fill(~allowed, -torch.inf)
        best = best_entries(scores_N, top_k)
        selected_TS[t].fill_(-1)[: len(best)] = best
    return selected_TS


def entry_scores(
    q_HD: torch.Tensor, weights_H: torch.Tensor, keys: Keys, sequence: int, visible: int
) -> torch.Tensor:
    """fp32 [visible]: scores of one token; the shapes depend on `visible` alone."""
    per_page = keys.pool.shape[1]
    step = max(1, ENTRY_TILE // per_page)
    pages = keys.pages[sequence, : -(-visible // per_page)]
    parts = []
    for first in range(0, len(pages), step):
        rows = keys.pool.index_select(0, pages[first : first + step]).flatten(0, 1)
        keys_ND = keys.values(rows[: visible - first * per_page])
        scores_HN = torch.mm(q_HD, keys_ND.t()).clamp_min_(0.0)
        parts.append(torch.mv(scores_HN.t(), weights_H))
    return torch.cat(parts) if parts else q_HD.new_empty(0)


def best_entries(scores_N: torch.Tensor, top_k: int) -> torch.Tensor:
    """Numbers of the `top_k` largest finite scores, the lower number among equals, ascending."""
    ranked = torch.sort(scores_N, descending=True, stable=True).indices[:top_k]
    return ranked[scores_N[ranked] > -torch.inf].sort().values


def allowed_entries(blocks_C: torch.Tensor, size: int, visible: int) -> torch.Tensor:
    """bool [visible]: whether an entry lies in one of the blocks."""
    kept = torch.zeros(-(-visible // size), dtype=torch.bool, device=blocks_C.device)
    kept[blocks_C[blocks_C >= 0]] = True
    return kept.repeat_interleave(size)[:visible]


def select_blocks(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    keys: Keys,
    sequence_T: torch.Tensor,
    visible_T: torch.Tensor,
    size: int,
    top_blocks: int,
) -> torch.Tensor:
    """Blocks int64 [T, top_blocks]; a token whose blocks all fit takes every one."""
    order_C = torch.arange(top_blocks, device=q_THD.device)
    blocks_TC = torch.where(order_C * size < visible_T[:, None], order_C, -1)
    sequences, counts = sequence_T.tolist(), visible_T.tolist()
    for t, (b, visible) in enumerate(zip(sequences, counts, strict=True)):
        if visible <= top_blocks * size:
            continue
        scores_N = entry_scores(q_THD[t].float(), weights_TH[t], keys, b, visible)
        best = best_entries(block_scores(scores_N, size), top_blocks)
        blocks_TC[t].fill_(-1)[: len(best)] = best
    return blocks_TC


def block_scores(scores_N: torch.Tensor, size: int) -> torch.Tensor:
    """The largest score of each block of `size` entries; +inf for the last block."""
    blocks = -(-len(scores_N) // size)
    padded = scores_N.new_full((blocks * size,), -torch.inf)
    padded[: len(scores_N)] = scores_N
    best = padded.view(blocks, size).amax(1)
    best[-1] = torch.inf
    return best
