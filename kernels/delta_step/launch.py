"""Launches of the Triton kernel: one for a step. None synchronises with the host."""

from __future__ import annotations

import torch

from kernels.delta_step.step import TAPS, Pools, Slots, Weights, counters_of, new_counters
from kernels.delta_step.triton import (
    BOUNDED_DECAY,
    CHANNEL_DECAY,
    HEAD_DECAY,
    SIGMOID_GATE,
    SILU_GATE,
    WARPS,
    delta_step,
)

STAGES = 1
GATES = {"sigmoid": SIGMOID_GATE.value, "silu": SILU_GATE.value}


def gated_delta_step(
    qkv_TC: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    z_TX: torch.Tensor,
    weights: Weights,
    pools: Pools,
    slots: Slots,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the package."""
    sequences = len(slots.read_B)
    if counters is None:
        counters = new_counters(sequences, pools)
    assert counters.dtype == torch.int32 and counters.numel() >= counters_of(sequences, pools)
    given = (qkv_TC, a_TH, b_TH, z_TX)
    return _launch(given, weights, pools, slots, counters, HEAD_DECAY.value, 0.0)


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
    """See the package."""
    kind = CHANNEL_DECAY if lower_bound is None else BOUNDED_DECAY
    given = (qkv_TC, f_TX, b_TH, z_TX)
    # A program owns its channels, and counts nothing.
    return _launch(given, weights, pools, slots, slots.read_B, kind.value, lower_bound or 0.0)


def constants(
    tokens: int, ratio: int, key_dim: int, value_dim: int, decay: int, gate: int
) -> dict[str, int | bool]:
    """The kernel's constants for `tokens` rows of a sequence, `ratio` value heads a key head."""
    width = max(key_dim, value_dim)
    padded = 1 << (width - 1).bit_length()
    return {
        "N": tokens, "R": ratio, "K": key_dim, "V": value_dim, "W": padded, "DECAY": decay,
        "GATE": gate,
    }  # fmt: skip


def _launch(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    weights: Weights,
    pools: Pools,
    slots: Slots,
    counters: torch.Tensor,
    decay: int,
    bound: float,
) -> torch.Tensor:
    sequences, tokens = slots.write_BN.shape
    count, heads, key_dim, value_dim = pools.delta_SHKV.shape
    qkv, z = rows[0], rows[3]
    channels = pools.window_SRC.shape[2]
    assert qkv.shape == (sequences * tokens, channels) and z.shape[1] == heads * value_dim
    assert weights.conv_CJ.shape == (channels, TAPS) and weights.norm_V.shape == (value_dim,)
    assert all(len(x) == len(qkv) and x.stride(1) == 1 for x in rows)
    assert qkv.dtype == pools.window_SRC.dtype
    out_THV = torch.empty(len(z), heads, value_dim, dtype=z.dtype, device=z.device)
    if sequences == 0:
        return out_THV
    ratio, gate = heads // pools.key_heads, GATES[weights.gate_type]
    delta_step[(heads, sequences)](
        *rows, pools.window_SRC, pools.delta_SHKV, weights.conv_CJ, weights.a_log_H,
        weights.dt_bias, weights.norm_V, out_THV, slots.read_B, slots.write_BN, slots.length_B,
        counters, *(x.stride(0) for x in rows), count, weights.eps, bound,
        **constants(tokens, ratio, key_dim, value_dim, decay, gate),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out_THV
