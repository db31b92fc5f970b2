"""Attention over paged keys and values, grouped heads, optional token selection and output gate."""

from __future__ import annotations

import torch

from kernels import backend
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
    positions are int64. Converted to the type of the pool. On a GPU rows whose sequence, position
    or page is out of range are ignored.
    """
    assert rows_TX.shape[1:] == pool_PNX.shape[2:]
    if backend.uses_triton(rows_TX):
        from kernels.paged_attention import launch

        place = launch.Place(page_table_BP, sequence_T, positions_T)
        launch.write(rows_TX, pool_PNX, place)
        return
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

    On a GPU operands are rounded to bf16 and D is a power of two. The numbers of tokens, sequences
    and heads pick the kernel's tile and splits; among steps alike in these a token's result does
    not depend on the others, bit for bit. Keys whose sequence or page is out of range are left
    out, and a token without any gets 0.
    Source: gated attention of Qwen3.5 and Qwen4-Exp.
    """
    assert q_THD.shape[1] % k_pool_PNGD.shape[2] == 0
    assert k_pool_PNGD.shape == v_pool_PNGD.shape and q_THD.shape[2] == k_pool_PNGD.shape[3]
    if backend.uses_triton(q_THD):
        from kernels.paged_attention import launch

        q_THD = q_THD.contiguous()
        return launch.attend(
            q_THD,
            k_pool_PNGD,
            v_pool_PNGD,
            launch.Place(page_table_BP, sequence_T, positions_T),
            torch.empty_like(q_THD),
            gate_THD=gate_THD,
            selected_TS=selected_TS,
        )
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
