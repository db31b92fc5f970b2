from __future__ import annotations

import torch


def top_k(scores_TN: torch.Tensor, visible_T: torch.Tensor, k: int) -> torch.Tensor:
    """By a stable sort; what may not be taken stands at -inf, behind all that may."""
    tokens, columns = scores_TN.shape
    column_N = torch.arange(columns, device=scores_TN.device)
    allowed_TN = (column_N < visible_T[:, None]) & (scores_TN > -torch.inf)
    ranked = scores_TN.masked_fill(~allowed_TN, -torch.inf).sort(
        dim=1, descending=True, stable=True
    )
    best = ranked.indices[:, :k].masked_fill(ranked.values[:, :k] == -torch.inf, columns)
    best = best.sort(1).values
    found = torch.full((tokens, k), -1, dtype=torch.int64, device=scores_TN.device)
    found[:, : best.shape[1]] = best.masked_fill(best == columns, -1)
    return found


def top_pools(
    scores_TN: torch.Tensor, positions_T: torch.Tensor, ratio: int, budget: int
) -> torch.Tensor:
    kept = budget // ratio
    pools_T = (positions_T + 1) // ratio
    scores_TN = scores_TN.masked_fill((pools_T <= kept)[:, None], 0.0)
    best_TK = top_k(scores_TN, pools_T, kept)
    order_R = torch.arange(ratio, device=scores_TN.device)
    tokens_TKR = best_TK[:, :, None] * ratio + order_R
    tokens_TKR = tokens_TKR.masked_fill(best_TK[:, :, None] < 0, -1)
    tail_TR = pools_T[:, None] * ratio + order_R[:-1]
    tail_TR = tail_TR.masked_fill(tail_TR > positions_T[:, None], -1)
    found = torch.cat([tokens_TKR.flatten(1), tail_TR], dim=1)
    return found.gather(1, (found < 0).to(torch.int8).argsort(dim=1, stable=True))
