"""Kimi delta attention: the delta rule with a decay of its own for every key channel."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.gated_delta import Slots, recur
from kernels.kda import reference

# Legend: T packed tokens, B sequences, H heads, K key dim, V value dim, W writes.


def kda(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    decay_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    state_BHKV: torch.Tensor,
    starts_B1: torch.Tensor,
    write_token_W: torch.Tensor,
    *,
    slots: Slots | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over packed sequences.

    Per token and head: q, k divided by sqrt(sum of squares + 1e-6) (q also by sqrt(K)), then
    S = exp(decay) S, row by row; u = beta (v - S^T k); S = S + k u^T; o = S^T q. q, k, v of any
    float type; decay (log space, <= 0), beta and state fp32. `starts` int64 [B + 1]; `state` is
    each sequence's state before its first token and stays unchanged. Returns o [T, H, V] in
    `out_dtype` and the states fp32 [W, H, K, V] after the packed tokens `write_token` int64 [W]; of
    a token out of range the row is left as it is. `slots`: see `gated_delta`.

    On a GPU as `gated_delta` says, but a log decay below -10 counts as -10. Source: Kimi Linear
    (arXiv 2510.26692), recurrent form; chunks: there, section on the chunkwise algorithm.
    """
    assert q_THK.shape == k_THK.shape == decay_THK.shape
    assert v_THV.shape[:2] == k_THK.shape[:2] == beta_TH.shape
    assert decay_THK.dtype == beta_TH.dtype == state_BHKV.dtype == torch.float32
    assert state_BHKV.shape[1:] == (*k_THK.shape[1:], v_THV.shape[2])
    inputs = (q_THK, k_THK, v_THV, decay_THK, beta_TH)
    if not backend.uses_triton(v_THV):
        return recur(reference.kda, inputs, state_BHKV, starts_B1, write_token_W, slots, out_dtype)
    from kernels.gated_delta.launch import states_of
    from kernels.kda import launch

    out = torch.empty(v_THV.shape, dtype=out_dtype, device=v_THV.device)
    states = states_of(state_BHKV, write_token_W, slots)
    launch.kda(*inputs, states, starts_B1, write_token_W, out)
    return out, states.written


def log_decay(
    f_THK: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_HK: torch.Tensor,
    *,
    lower_bound: float | None,
) -> torch.Tensor:
    """Logarithm of the decay of each key channel, fp32 [T, H, K].

    With g = f + dt_bias: lower_bound * sigmoid(exp(a_log) g), between lower_bound (< 0) and 0;
    without a bound -exp(a_log) softplus(g). f of any float type.
    """
    assert f_THK.shape[1:] == dt_bias_HK.shape and a_log_H.shape == f_THK.shape[1:2]
    assert lower_bound is None or lower_bound < 0
    if backend.uses_triton(f_THK):
        from kernels.kda import launch

        return launch.log_decay(f_THK, a_log_H, dt_bias_HK, lower_bound)
    return reference.log_decay(f_THK, a_log_H, dt_bias_HK, lower_bound)
