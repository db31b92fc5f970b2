"""Engram: table rows to values, and the gate between them and the residual streams."""

from __future__ import annotations

import torch

from kernels.engram import reference

# Legend: T tokens, h heads of all n-gram orders, V values of a row, G groups of a row, n streams,
# D hidden.

GROUP_VALUES = 32  # values of a row that share a scale


def decode_rows(rows_TB: torch.Tensor, heads: int) -> torch.Tensor:
    """Values fp32 [T, h * V] of rows as stored: uint8 [T, h * (V + V / 32)].

    Each row holds V e4m3 codes, then one ue8m0 byte (2^(byte - 127)) for every 32 of them.
    Heads stay in their order. Exact.
    """
    assert rows_TB.dtype == torch.uint8 and rows_TB.shape[1] % heads == 0
    assert rows_TB.shape[1] // heads % (GROUP_VALUES + 1) == 0
    return reference.decode_rows(rows_TB, heads)


def engram_gate(
    streams_TnD: torch.Tensor,
    keys_TnD: torch.Tensor,
    value_TD: torch.Tensor,
    q_nD: torch.Tensor,
    k_nD: torch.Tensor,
    closed_T: torch.Tensor | None,
    *,
    eps: float,
) -> torch.Tensor:
    """streams + gate * value: fp32 [T, n, D].

    Per stream X with its key K and weights q, k [n, D], in fp32:
    dot = sum X q k K / sqrt((mean X^2 + eps) (mean K^2 + eps) D);
    gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)), 0 where `closed_T` (bool [T], or None
    for nowhere) holds, as for tokens of images. streams, keys [T, n, D] and value [T, D] of any
    float type. Source: Engram of DeepSeek-V4.1.
    """
    assert streams_TnD.shape == keys_TnD.shape and q_nD.shape == k_nD.shape == keys_TnD.shape[1:]
    assert value_TD.shape == (keys_TnD.shape[0], keys_TnD.shape[2])
    return reference.engram_gate(streams_TnD, keys_TnD, value_TD, q_nD, k_nD, closed_T, eps)
