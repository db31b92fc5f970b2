"""N-gram (per-layer) embedding: row ids by hash, and the gate between rows and residual streams."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.ple import reference

# Legend: T tokens, N n-gram size, h heads of all orders, C streams, H hidden.


def ngram_row_ids(
    history_TN: torch.Tensor,
    multipliers_N: torch.Tensor,
    head_sizes_h: torch.Tensor,
    head_offsets_h: torch.Tensor,
    eos: int,
) -> torch.Tensor:
    """Table rows int64 [T, h] of each token, the heads of bigrams first, then trigrams.

    history int64 [T, N]: a token's id, then its predecessors, nearest first, -1 where missing.
    From the first missing or end-of-text predecessor on, all read as `eos`. With c its columns,
    order n mixes xor_{s < n} c_s * multiplier_s; row = mix mod size + offset per head.
    Source: Qwen4-Exp n-gram embedding.
    """
    assert history_TN.dtype == torch.int64 and history_TN.shape[1] == len(multipliers_N)
    assert len(head_sizes_h) % (history_TN.shape[1] - 1) == 0
    if backend.uses_triton(history_TN):
        from kernels.ple import launch

        return launch.hashed_rows(
            history_TN.contiguous(), multipliers_N, head_sizes_h, head_offsets_h, eos
        )
    return reference.ngram_row_ids(history_TN, multipliers_N, head_sizes_h, head_offsets_h, eos)


def hashed_rows(
    codes_TN: torch.Tensor,
    multipliers_N: torch.Tensor,
    head_sizes_h: torch.Tensor,
    head_offsets_h: torch.Tensor,
) -> torch.Tensor:
    """Table rows int64 [T, h] of codes int64 [T, N] >= 0, a token's own first, then backwards.

    Order n (2 to N; its heads lie together, smaller orders first) mixes
    xor_{s < n} code_s * multiplier_s; row = mix mod size + offset per head. No product may reach
    2^63. Source: n-gram embedding of Qwen4-Exp and of DeepSeek-V4.1 (Engram).
    """
    assert codes_TN.dtype == torch.int64 and codes_TN.shape[1] == len(multipliers_N)
    assert len(head_sizes_h) % (codes_TN.shape[1] - 1) == 0
    if backend.uses_triton(codes_TN):
        from kernels.ple import launch

        return launch.hashed_rows(
            codes_TN.contiguous(), multipliers_N, head_sizes_h, head_offsets_h
        )
    return reference.hashed_rows(codes_TN, multipliers_N, head_sizes_h, head_offsets_h)


def ple_gate(
    key_TX: torch.Tensor, query_TX: torch.Tensor, value_TH: torch.Tensor, count: int
) -> torch.Tensor:
    """sigmoid(s) * value per stream, fp32 [T, C * H].

    s = sign(a) sqrt(max(|a|, 1e-6)), a = <key_c, query_c> / sqrt(H) for stream c; key and query
    [T, C * H] are normalised already. Source: Qwen4-Exp PLE layer.
    """
    assert key_TX.shape == query_TX.shape and key_TX.shape[1] == count * value_TH.shape[1]
    if backend.uses_triton(key_TX):
        from kernels.ple import launch

        out_TX = torch.empty(key_TX.shape, dtype=torch.float32, device=key_TX.device)
        return launch.ple_gate(key_TX, query_TX, value_TH, count, out_TX)
    return reference.ple_gate(key_TX, query_TX, value_TH, count)


def gather_rows(
    table_RB: torch.Tensor, ids_Th: torch.Tensor, scale: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Values fp32 [T, h * B] of rows `ids` (int64 [T, h]) of a table; zeros for ids out of range.

    table uint8 [R, B] of e4m3 codes, none of them NaN, times `scale`. With ids on a GPU, the table
    is in page-locked memory of the host, as in `kernels.engram.gather_rows`.
    """
    assert table_RB.dtype == torch.uint8 and ids_Th.dtype == torch.int64
    if not backend.uses_triton(ids_Th):
        values_TE = reference.gather_rows(table_RB, ids_Th, scale)
        return values_TE if out is None else out.copy_(values_TE)
    from kernels.engram import launch

    if out is None:
        shape = (ids_Th.shape[0], ids_Th.shape[1] * table_RB.shape[1])
        out = torch.empty(shape, dtype=torch.float32, device=ids_Th.device)
    return launch.gather_rows(table_RB, ids_Th.contiguous(), out, scaled=False, scale=scale)
