"""Engram: table rows to values, and the gate between them and the residual streams."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.engram import reference

# Legend: T tokens, h heads of all n-gram orders, V values of a row, G groups of a row, R rows of
# the table, n streams, D hidden.

GROUP_VALUES = 32  # values of a row that share a scale


def decode_rows(
    rows_TB: torch.Tensor, heads: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Values fp32 [T, h * V] of rows as stored: uint8 [T, h * (V + V / 32)].

    Each row holds V e4m3 codes, then one ue8m0 byte (2^(byte - 127)) for every 32 of them, neither
    of them NaN. Heads stay in their order. Exact, but for the rounding to the type of `out`.
    """
    assert rows_TB.dtype == torch.uint8 and rows_TB.shape[1] % heads == 0
    assert rows_TB.shape[1] // heads % (GROUP_VALUES + 1) == 0
    if not backend.uses_triton(rows_TB):
        values_TE = reference.decode_rows(rows_TB, heads)
        return values_TE if out is None else out.copy_(values_TE)
    from kernels.engram import launch

    if out is None:
        width = rows_TB.shape[1] // (GROUP_VALUES + 1) * GROUP_VALUES
        out = torch.empty(rows_TB.shape[0], width, dtype=torch.float32, device=rows_TB.device)
    return launch.decode_rows(rows_TB.contiguous(), heads, out)


def gather_rows(
    table_RB: torch.Tensor, ids_Th: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Values fp32 [T, h * V] of rows `ids` (int64 [T, h]) of a table; zeros for ids out of range.

    table uint8 [R, V + V / 32] in rows as `decode_rows` takes them. With ids on a GPU, the table
    is in page-locked memory of the host (pinned, or registered with the driver) and is read from
    there by the kernel, without a copy; it must stay mapped while a launch or a graph may read it.
    """
    assert table_RB.dtype == torch.uint8 and table_RB.shape[1] % (GROUP_VALUES + 1) == 0
    if not backend.uses_triton(ids_Th):
        values_TE = reference.gather_rows(table_RB, ids_Th)
        return values_TE if out is None else out.copy_(values_TE)
    from kernels.engram import launch

    if out is None:
        width = table_RB.shape[1] // (GROUP_VALUES + 1) * GROUP_VALUES * ids_Th.shape[1]
        out = torch.empty(ids_Th.shape[0], width, dtype=torch.float32, device=ids_Th.device)
    return launch.gather_rows(table_RB, ids_Th, out, scaled=True)


def engram_gate(
    streams_TnD: torch.Tensor,
    keys_TnD: torch.Tensor,
    value_TD: torch.Tensor,
    q_nD: torch.Tensor,
    k_nD: torch.Tensor,
    closed_T: torch.Tensor | None,
    *,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """streams + gate * value: fp32 [T, n, D].

    Per stream X with its key K and weights q, k [n, D], in fp32:
    dot = sum X q k K / sqrt((mean X^2 + eps) (mean K^2 + eps) D);
    gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)), 0 where `closed_T` (bool [T], or None
    for nowhere) holds, as for tokens of images. streams, keys [T, n, D] and value [T, D] of any
    float type; `out` too, which may be the streams. Source: Engram of DeepSeek-V4.1.
    """
    assert streams_TnD.shape == keys_TnD.shape and q_nD.shape == k_nD.shape == keys_TnD.shape[1:]
    assert value_TD.shape == (keys_TnD.shape[0], keys_TnD.shape[2])
    if not backend.uses_triton(streams_TnD):
        y_TnD = reference.engram_gate(streams_TnD, keys_TnD, value_TD, q_nD, k_nD, closed_T, eps)
        return y_TnD if out is None else out.copy_(y_TnD)
    from kernels.engram import launch

    if out is None:
        out = torch.empty(streams_TnD.shape, dtype=torch.float32, device=streams_TnD.device)
    return launch.engram_gate(
        streams_TnD, keys_TnD, value_TD, q_nD.contiguous(), k_nD.contiguous(), closed_T, out, eps
    )
