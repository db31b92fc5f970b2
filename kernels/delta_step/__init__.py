"""Recurrent steps of the delta rule: one token of a sequence, or a few to verify, in one launch."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.delta_step import reference
from kernels.delta_step.step import Pools, Slots, Weights, new_workspace

__all__ = ["Pools", "Slots", "Weights", "gated_delta_step", "kda_step", "new_workspace"]

# Legend: B sequences of N rows each, T = B * N rows, H value heads, G key heads, K key dim,
# V value dim, C = 2 G K + H V channels: q and k of G heads each, then v of H heads.


def gated_delta_step(
    qkv_TC: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    z_TX: torch.Tensor,
    weights: Weights,
    pools: Pools,
    slots: Slots,
    *,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """One step of the gated delta net between its input projections and its output projection.

    `qkv`, `z` [T, X = H * V] in the type of the model, `a` and `b` [T, H] of any float type; rows
    of sequence b are b * N to b * N + length[b]. silu of the causal convolution over four rows,
    decay = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b), `kernels.gated_delta`, then
    `kernels.rms_norm.rms_norm_gated` with the gate z. States are read and written in `pools`.
    Returns [T, H, V] in the type of z, zeros in rows that are no tokens. A sequence's results do
    not depend on the others, nor on how many there are; those of a token with N = 1 and with more
    rows may differ by rounding. `workspace`: see `new_workspace`; without one a launch is added.
    """
    assert a_TH.shape == b_TH.shape and weights.dt_bias.shape == weights.a_log_H.shape
    assert a_TH.shape[1] == pools.delta_SHKV.shape[1]
    if not backend.uses_triton(qkv_TC):
        return reference.gated_delta_step(qkv_TC, a_TH, b_TH, z_TX, weights, pools, slots)
    from kernels.delta_step import launch

    return launch.gated_delta_step(qkv_TC, a_TH, b_TH, z_TX, weights, pools, slots, workspace)


def kda_step(
    qkv_TC: torch.Tensor,
    f_TX: torch.Tensor,
    b_TH: torch.Tensor,
    z_TX: torch.Tensor,
    weights: Weights,
    pools: Pools,
    slots: Slots,
    *,
    lower_bound: float | None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `gated_delta_step` for Kimi delta attention: each key channel has its decay.

    `f` [T, X = H * K] of any float type gives the decays through `kernels.kda.log_decay`, and the
    recurrence is that of `kernels.kda`; there are as many key heads as value heads.
    """
    heads, key_dim = pools.delta_SHKV.shape[1:3]
    assert pools.key_heads == heads and weights.dt_bias.shape == (heads * key_dim,)
    assert f_TX.shape[1] == heads * key_dim and b_TH.shape[1] == heads
    assert lower_bound is None or lower_bound < 0
    if not backend.uses_triton(qkv_TC):
        return reference.kda_step(qkv_TC, f_TX, b_TH, z_TX, weights, pools, slots, lower_bound)
    from kernels.delta_step import launch

    return launch.kda_step(qkv_TC, f_TX, b_TH, z_TX, weights, pools, slots, lower_bound, workspace)
