from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.activation.reference import sigmoid, softplus
from kernels.causal_conv.reference import causal_conv, history_rows
from kernels.delta_step.step import TAPS, Pools, Slots, Weights
from kernels.gated_delta.reference import gated_delta
from kernels.kda.reference import kda, log_decay
from kernels.rms_norm.reference import rms_norm_gated

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def gated_delta_step(
    qkv_TC: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    z_TX: torch.Tensor,
    weights: Weights,
    pools: Pools,
    slots: Slots,
) -> torch.Tensor:
    rate_H = -weights.a_log_H.float().exp()
    decay_TH = softplus(a_TH.float() + weights.dt_bias.float()) * rate_H
    return _step(gated_delta, qkv_TC, decay_TH, b_TH, z_TX, weights, pools, slots)


def kda_step(
    qkv_TC: torch.Tensor,
    f_TX: torch.Tensor,
    b_TH: torch.Tensor,
    z_TX: torch.Tensor,
    weights: Weights,
    pools: Pools,
    slots: Slots,
    lower_bound: float | None,
) -> torch.Tensor:
    heads, key_dim = pools.delta_SHKV.shape[1:3]
    f_THK = f_TX.unflatten(1, (heads, key_dim))
    dt_bias_HK = weights.dt_bias.view(heads, key_dim)
    decay_THK = log_decay(f_THK, weights.a_log_H, dt_bias_HK, lower_bound)
    return _step(kda, qkv_TC, decay_THK, b_TH, z_TX, weights, pools, slots)


def _step(
    rule: Rule,
    qkv_TC: torch.Tensor,
    decay_T: torch.Tensor,
    b_TH: torch.Tensor,
    z_TX: torch.Tensor,
    weights: Weights,
    pools: Pools,
    slots: Slots,
) -> torch.Tensor:
    rows = _rows(slots, pools.window_SRC.shape[0])
    heads, key_dim, value_dim = pools.delta_SHKV.shape[1:]
    keys = pools.key_heads * key_dim
    past_MC = torch.cat([_read(pools.window_SRC, slots).flatten(0, 1), qkv_TC])
    mixed = causal_conv(past_MC, rows.past_TJ, weights.conv_CJ)
    q, k, v = mixed.split([keys, keys, heads * value_dim], dim=1)
    q, k = (x.unflatten(1, (-1, key_dim)) for x in (q, k))
    v_THV = v.unflatten(1, (heads, value_dim))
    token_T, beta_TH = rows.token_T, sigmoid(b_TH[rows.token_T])
    o_THV, states_WHKV = rule(
        q, k, v_THV, decay_T[token_T], beta_TH, _read(pools.delta_SHKV, slots), rows.starts_B1,
        rows.write_W,
    )  # fmt: skip
    pools.delta_SHKV[rows.slot_W] = states_WHKV
    pools.window_SRC[rows.slot_W] = past_MC[rows.past_TJ[rows.write_W, 1:]]
    out = z_TX.new_zeros(z_TX.shape[0], heads, value_dim)
    gate = z_TX.view(out.shape)[token_T]
    eps, gate_type = weights.eps, weights.gate_type
    out[token_T] = rms_norm_gated(o_THV, gate, weights.norm_V, eps, gate_type).to(out.dtype)
    return out


def _read(pool: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Copies of the states of every sequence; zeros of slots that are none."""
    known_B = (slots.read_B >= 0) & (slots.read_B < pool.shape[0])
    values = pool[torch.where(known_B, slots.read_B, 0)]
    return values.masked_fill_(~known_B.view(-1, *(1,) * (pool.dim() - 1)), 0)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tokens of all sequences behind each other, and which of them leave a state where."""

    token_T: torch.Tensor  # among the rows given
    starts_B1: torch.Tensor
    past_TJ: torch.Tensor  # rows of the four taps among [windows; rows given]
    write_W: torch.Tensor  # tokens
    slot_W: torch.Tensor


def _rows(slots: Slots, count: int) -> _Rows:
    sequences, longest = slots.write_BN.shape
    length_B = slots.length_B.clamp(0, longest)
    place_N = torch.arange(longest)
    sequence_T, place_T = (place_N < length_B[:, None]).nonzero(as_tuple=True)
    token_T = sequence_T * longest + place_T
    delays = tuple(reversed(range(TAPS)))
    target_T = slots.write_BN[sequence_T, place_T]
    write_W = ((target_T >= 0) & (target_T < count)).nonzero()[:, 0]
    return _Rows(
        token_T,
        torch.cat([length_B.new_zeros(1), length_B.cumsum(0)]),
        history_rows(token_T, sequence_T, place_T, sequences, TAPS - 1, delays),
        write_W,
        target_T[write_W],
    )
