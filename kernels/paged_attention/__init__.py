"""Attention over paged keys and values, grouped heads, optional token selection and output gate."""

from __future__ import annotations

import torch

from kernels.paged_attention import reference

# Legend: T packed tokens, B sequences, P pages of a table, H query heads, G key heads, D head dim,
# N entries of a page, S selected tokens.


def write_pages(
    rows_TX: torch.Tensor,
    pool_PNX: torch.Tensor,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
) -> None:
    """Put row t at entry `positions[t]` of its sequence's pages, in place.

    rows [T, ...], pool [pages, N, ...] of the same trailing shape; the table, sequence numbers and
    positions are int64.
    """
    assert rows_TX.shape[1:] == pool_PNX.shape[2:]
    reference.write_pages(rows_TX, pool_PNX, page_table_BP, sequence_T, positions_T)


def paged_attention(
    q_THD: torch.Tensor,
    k_pool_PNGD: torch.Tensor,
    v_pool_PNGD: torch.Tensor,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    *,
    gate_THD: torch.Tensor | None = None,
    selected_TS: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v over the tokens 0..position of each token's sequence.

    q [T, H, D]; pools [pages, N, G, D]; query head h reads key head h // (H / G). `selected` int64
    [T, S] restricts a token to the positions of its row, ascending, -1 behind the last one.
    `gate` [T, H, D] multiplies the result by sigmoid(gate). Softmax in fp32; returns [T, H, D] in
    the type of q. The keys of the step's own tokens must be in the pools already.
    Source: gated attention of Qwen3.5 and Qwen4-Exp.
    """
    assert q_THD.shape[1] % k_pool_PNGD.shape[2] == 0
    assert k_pool_PNGD.shape == v_pool_PNGD.shape and q_THD.shape[2] == k_pool_PNGD.shape[3]
    return reference.paged_attention(
        q_THD,
        k_pool_PNGD,
        v_pool_PNGD,
        page_table_BP,
        sequence_T,
        positions_T,
        gate_THD,
        selected_TS,
    )
