"""N-gram (per-layer) embedding: row ids by hash, and the gate between rows and residual streams."""

from __future__ import annotations

import torch

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
    return reference.hashed_rows(codes_TN, multipliers_N, head_sizes_h, head_offsets_h)


def ple_gate(
    key_TX: torch.Tensor, query_TX: torch.Tensor, value_TH: torch.Tensor, count: int
) -> torch.Tensor:
    """sigmoid(s) * value per stream, fp32 [T, C * H].

    s = sign(a) sqrt(max(|a|, 1e-6)), a = <key_c, query_c> / sqrt(H) for stream c; key and query
    [T, C * H] are normalised already. Source: Qwen4-Exp PLE layer.
    """
    assert key_TX.shape == query_TX.shape and key_TX.shape[1] == count * value_TH.shape[1]
    return reference.ple_gate(key_TX, query_TX, value_TH, count)
