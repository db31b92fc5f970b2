from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.cache_rows import decode_rows

if TYPE_CHECKING:
    from kernels.sparse_attention import Entries, Rows


def sparse_attention(
    q_THD: torch.Tensor,
    window: Rows,
    first_T: torch.Tensor,
    last_T: torch.Tensor,
    sequence_T: torch.Tensor,
    sinks_H: torch.Tensor,
    scale: float,
    entries: Entries | None,
) -> torch.Tensor:
    out = torch.empty_like(q_THD, dtype=torch.float32)
    firsts, lasts = first_T.tolist(), last_T.tolist()
    for t, b in enumerate(sequence_T.tolist()):
        rows = torch.arange(firsts[t], lasts[t] + 1, device=q_THD.device)
        keys = gather_rows(window, b, rows)
        if entries is not None:
            keys = torch.cat([keys, gather_rows(entries.rows, b, _chosen(entries, t))])
        out[t] = attend(q_THD[t].float(), keys, sinks_H, scale)
    return out.to(q_THD.dtype)


def gather_rows(rows: Rows, sequence: int, numbers_L: torch.Tensor) -> torch.Tensor:
    """fp32 [L, D]; the number of a row among all of the pool is 64-bit."""
    per_page = rows.pool.shape[1]
    pages = rows.pages[sequence].index_select(0, numbers_L // per_page)
    flat = rows.pool.flatten(0, 1)
    found = flat.index_select(0, pages * per_page + numbers_L % per_page)
    return found.float() if rows.form is None else decode_rows(found, rows.form)


def _chosen(entries: Entries, token: int) -> torch.Tensor:
    if entries.selected_TS is None:
        return torch.arange(int(entries.visible_T[token]), device=entries.visible_T.device)
    selected = entries.selected_TS[token]
    return selected[selected >= 0]


def attend(
    q_HD: torch.Tensor, keys_LD: torch.Tensor, sinks_H: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query against L keys; the shapes, and so the rounding, depend on L alone."""
    scores_HL = torch.mm(q_HD, keys_LD.t()).mul_(scale)
    sinks_H1 = sinks_H[:, None]
    top_H1 = torch.maximum(scores_HL.amax(-1, keepdim=True), sinks_H1)
    weights_HL = (scores_HL - top_H1).exp_()
    total_H1 = weights_HL.sum(-1, keepdim=True) + (sinks_H1 - top_H1).exp()
    return torch.mm(weights_HL, keys_LD).div_(total_H1)
