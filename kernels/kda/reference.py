from __future__ import annotations

import torch

from kernels.activation.reference import sigmoid, softplus
from kernels.gated_delta.reference import L2_EPS, recur, time_order


def log_decay(
    f_THK: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_HK: torch.Tensor,
    lower_bound: float | None,
) -> torch.Tensor:
    gate_THK = f_THK.float() + dt_bias_HK.float()
    rate_H1 = a_log_H.float().exp()[:, None]
    if lower_bound is None:
        return softplus(gate_THK).mul_(-rate_H1)
    return sigmoid(gate_THK * rate_H1).mul_(lower_bound)


def kda(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    decay_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    state_BHKV: torch.Tensor,
    starts_B1: torch.Tensor,
    write_token_W: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in time order, heads inside them: token i of all sequences is one batched product."""
    heads, width = v_THV.shape[1:]
    time = time_order(starts_B1.tolist(), write_token_W.tolist())
    rows_T = torch.tensor(time.rows, device=q_THK.device)
    in_time = [x.index_select(0, rows_T).float().flatten(0, 1) for x in (q_THK, k_THK, v_THV)]
    q = _unit(in_time[0]).mul_(q_THK.shape[2] ** -0.5)[:, None, :]
    k = _unit(in_time[1])[:, :, None]
    v = in_time[2][:, None, :]
    decay = decay_THK.index_select(0, rows_T).exp_().flatten(0, 1)[:, :, None]
    beta = beta_TH.index_select(0, rows_T).view(-1, 1, 1)
    out_THV = torch.empty_like(v_THV, dtype=torch.float32)
    out, states_W = recur(time, q, k, v, decay, beta, state_BHKV, len(write_token_W))
    out_THV.index_copy_(0, rows_T, out.view(-1, heads, width))
    return out_THV, states_W


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().sum(-1, keepdim=True).add_(L2_EPS).sqrt_()
