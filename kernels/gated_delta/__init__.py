"""Gated delta rule: a recurrence over a matrix state per head."""

from __future__ import annotations

import torch

from kernels.gated_delta import reference

# Legend: T packed tokens, B sequences, G key heads, H value heads, K key dim, V value dim,
# W writes.


def gated_delta(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_THV: torch.Tensor,
    decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    state_BHKV: torch.Tensor,
    starts_B1: torch.Tensor,
    write_token_W: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over packed sequences.

    Per token: q, k scaled to unit length (q also by K^-1/2), then
    S = exp(decay) S; u = beta (v - S^T k); S = S + k u^T; o = S^T q. Value head h reads key head
    h // (H / G). q, k, v of any float type; decay (log space, <= 0), beta and state fp32.
    `starts` int64 [B + 1]; `state` is each sequence's state before its first token and stays
    unchanged. Returns o fp32 [T, H, V] and the states fp32 [W, H, K, V] after the packed tokens
    `write_token` int64 [W]. Source: gated delta rule of Qwen3.5 / Qwen4-Exp (recurrent form).
    """
    assert q_TGK.shape == k_TGK.shape and v_THV.shape[1] % k_TGK.shape[1] == 0
    assert decay_TH.dtype == beta_TH.dtype == state_BHKV.dtype == torch.float32
    assert state_BHKV.shape[1:] == (*v_THV.shape[1:2], k_TGK.shape[2], v_THV.shape[2])
    return reference.gated_delta(
        q_TGK, k_TGK, v_THV, decay_TH, beta_TH, state_BHKV, starts_B1, write_token_W
    )
