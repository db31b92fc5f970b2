from __future__ import annotations

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
    """Tokens whose blocks all fit take every position; only the others score their blocks."""
    order_S = torch.arange(budget + ratio - 1, device=q_THD.device)
    selected_TS = torch.where(order_S <= positions_T[:, None], order_S, -1)
    sequences, positions = sequence_T.tolist(), positions_T.tolist()
    for t, (b, position) in enumerate(zip(sequences, positions, strict=True)):
        blocks = (position + 1) // ratio
        if blocks <= budget // ratio:
            continue
        scores = _block_scores(q_THD[t].float(), pool_PND, page_table_BP[b], blocks)
        best = torch.sort(scores, descending=True, stable=True).indices[: budget // ratio]
        tokens = best.sort().values[:, None] * ratio + order_S[:ratio]
        tail = torch.arange(blocks * ratio, position + 1, device=q_THD.device)
        selected_TS[t].fill_(-1)[: budget + len(tail)] = torch.cat([tokens.flatten(), tail])
    return selected_TS


def _block_scores(
    q_HD: torch.Tensor, pool_PND: torch.Tensor, pages_P: torch.Tensor, blocks: int
) -> torch.Tensor:
    per_page, width = pool_PND.shape[1:]
    pages = pages_P[: -(-blocks // per_page)]
    keys_ND = pool_PND.index_select(0, pages).flatten(0, 1)[:blocks].float()
    scores_HN = torch.mm(q_HD, keys_ND.t()).clamp_min_(0.0)
    return scores_HN.sum(0).mul_(width**-0.5)
