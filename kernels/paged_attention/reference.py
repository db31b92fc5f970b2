from __future__ import annotations

import torch

from kernels.activation.reference import sigmoid


def write_pages(
    rows_TX: torch.Tensor,
    pool_PNX: torch.Tensor,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
) -> None:
    entries_T = entry_numbers(page_table_BP, sequence_T, positions_T, pool_PNX.shape[1])
    pool_PNX.flatten(0, 1).index_copy_(0, entries_T, rows_TX.to(pool_PNX.dtype))


def entry_numbers(
    page_table_BP: torch.Tensor, sequence: torch.Tensor, position: torch.Tensor, per_page: int
) -> torch.Tensor:
    """Number of an entry among all entries of the pool."""
    page = page_table_BP[sequence, position // per_page]
    return page * per_page + position % per_page


def paged_attention(
    q_THD: torch.Tensor,
    k_pool_PNGD: torch.Tensor,
    v_pool_PNGD: torch.Tensor,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    gate_THD: torch.Tensor | None,
    selected_TS: torch.Tensor | None,
) -> torch.Tensor:
    per_page = k_pool_PNGD.shape[1]
    k_pool, v_pool = k_pool_PNGD.flatten(0, 1), v_pool_PNGD.flatten(0, 1)
    sequences, positions = sequence_T.tolist(), positions_T.tolist()
    out = torch.empty_like(q_THD, dtype=torch.float32)
    for t, (b, position) in enumerate(zip(sequences, positions, strict=True)):
        if selected_TS is None:
            visible = torch.arange(position + 1, device=q_THD.device)
        else:
            visible = selected_TS[t]
            visible = visible[visible >= 0]
        pages = page_table_BP[b].index_select(0, visible // per_page)
        entries = pages * per_page + visible % per_page
        k_LGD = k_pool.index_select(0, entries).float()
        v_LGD = v_pool.index_select(0, entries).float()
        out[t] = attend(q_THD[t].float(), k_LGD, v_LGD)
    if gate_THD is not None:
        out.mul_(sigmoid(gate_THD))
    return out.to(q_THD.dtype)


def attend(q_HD: torch.Tensor, k_LGD: torch.Tensor, v_LGD: torch.Tensor) -> torch.Tensor:
    """One query against L keys; the shapes, and so the rounding, depend on L alone."""
    heads, width = q_HD.shape
    groups = k_LGD.shape[1]
    q = q_HD.view(groups, heads // groups, width)
    scores = torch.bmm(q, k_LGD.permute(1, 2, 0)).mul_(width**-0.5)
    return torch.bmm(torch.softmax(scores, dim=-1), v_LGD.transpose(0, 1)).view(heads, width)
