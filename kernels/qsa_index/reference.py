from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.paged_attention.reference import entry_numbers


def mean_of_blocks(keys_TRD: torch.Tensor) -> torch.Tensor:
    rows_RTD = keys_TRD.float().unbind(1)
    total = rows_RTD[0]
    for row in rows_RTD[1:]:
        total = total + row
    return total.div_(len(rows_RTD)).to(keys_TRD.dtype)


def write_closed_blocks(
    keys_TD: torch.Tensor,
    pool_PND: torch.Tensor,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
) -> None:
    closing = (positions_T + 1) % ratio == 0
    blocks = positions_T[closing] // ratio
    entries = entry_numbers(page_table_BP, sequence_T[closing], blocks, pool_PND.shape[1])
    pool_PND.flatten(0, 1).index_copy_(0, entries, keys_TD[closing].to(pool_PND.dtype))


def select_tokens(
    q_THD: torch.Tensor,
    pool_PND: torch.Tensor,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
    budget: int,
) -> torch.Tensor:
    def scores(t: int, b: int, blocks: int) -> torch.Tensor:
        return _block_scores(q_THD[t].float(), pool_PND, page_table_BP[b], blocks)

    return best_blocks(scores, sequence_T, positions_T, ratio, budget)


def best_blocks(
    scores: Callable[[int, int, int], torch.Tensor],
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
    budget: int,
) -> torch.Tensor:
    """Selected positions [T, budget + ratio - 1] from scores(token, sequence, blocks) [blocks].

    Tokens whose blocks all fit take every position; only the others score their blocks.
    """
    order_S = torch.arange(budget + ratio - 1, device=positions_T.device)
    selected_TS = torch.where(order_S <= positions_T[:, None], order_S, -1)
    sequences, positions = sequence_T.tolist(), positions_T.tolist()
    for t, (b, position) in enumerate(zip(sequences, positions, strict=True)):
        blocks = (position + 1) // ratio
        if blocks <= budget // ratio:
            continue
        ranked = torch.sort(scores(t, b, blocks), descending=True, stable=True).indices
        tokens = ranked[: budget // ratio].sort().values[:, None] * ratio + order_S[:ratio]
        tail = torch.arange(blocks * ratio, position + 1, device=positions_T.device)
        selected_TS[t].fill_(-1)[: budget + len(tail)] = torch.cat([tokens.flatten(), tail])
    return selected_TS


def block_entries(pool_PNX: torch.Tensor, pages_P: torch.Tensor, blocks: int) -> torch.Tensor:
    """The first `blocks` entries [blocks, ...] of a sequence's pages."""
    pages = pages_P[: -(-blocks // pool_PNX.shape[1])]
    return pool_PNX.index_select(0, pages).flatten(0, 1)[:blocks]


def _block_scores(
    q_HD: torch.Tensor, pool_PND: torch.Tensor, pages_P: torch.Tensor, blocks: int
) -> torch.Tensor:
    keys_ND = block_entries(pool_PND, pages_P, blocks).float()
    scores_HN = torch.mm(q_HD, keys_ND.t()).clamp_min_(0.0)
    return scores_HN.sum(0).mul_(keys_ND.shape[1] ** -0.5)
