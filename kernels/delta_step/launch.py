"""Launches of the Triton kernels: one for a step. None synchronises with the host."""

from __future__ import annotations

import torch

from kernels.delta_step.decode.triton import SPLIT, delta_decode
from kernels.delta_step.step import (
    TAPS,
    Pools,
    Slots,
    Weights,
    new_workspace,
    padded,
    words_of,
    workspace_of,
)
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
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the package."""
    given = (qkv_TC, a_TH, b_TH, z_TX)
    return _launch(given, weights, pools, slots, workspace, HEAD_DECAY.value, 0.0)


def kda_step(
    qkv_TC: torch.Tensor,
    f_TX: torch.Tensor,
    b_TH: torch.Tensor,
    z_TX: torch.Tensor,
    weights: Weights,
    pools: Pools,
    slots: Slots,
    lower_bound: float | None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the package."""
    kind = CHANNEL_DECAY if lower_bound is None else BOUNDED_DECAY
    given = (qkv_TC, f_TX, b_TH, z_TX)
    return _launch(given, weights, pools, slots, workspace, kind.value, lower_bound or 0.0)


def constants(
    tokens: int, ratio: int, key_dim: int, value_dim: int, decay: int, gate: int
) -> dict[str, int | bool]:
    """The constants of a kernel for `tokens` rows of a sequence, `ratio` value heads a key head."""
    rows: dict[str, int | bool] = {} if tokens == 1 else {"N": tokens}
    return rows | {
        "R": ratio, "K": key_dim, "V": value_dim, "W": padded(max(key_dim, value_dim)),
        "DECAY": decay, "GATE": gate,
    }  # fmt: skip


def _launch(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    weights: Weights,
    pools: Pools,
    slots: Slots,
    workspace: torch.Tensor | None,
    decay: int,
    bound: float,
) -> torch.Tensor:
    sequences, tokens = slots.write_BN.shape
    count, heads, key_dim, value_dim = pools.delta_SHKV.shape
    qkv, z = rows[0], rows[3]
    out_THV = torch.empty(len(z), heads, value_dim, dtype=z.dtype, device=z.device)
    if sequences == 0:
        return out_THV
    channels = pools.window_SRC.shape[2]
    assert qkv.shape == (sequences * tokens, channels) and z.shape[1] == heads * value_dim
    assert weights.conv_CJ.shape == (channels, TAPS) and weights.norm_V.shape == (value_dim,)
    assert all(len(x) == len(qkv) and x.stride(1) == 1 for x in rows)
    assert qkv.dtype == pools.window_SRC.dtype == weights.conv_CJ.dtype and qkv.itemsize == 2
    words, counters = _workspace(workspace, sequences, pools)
    given = (
        *rows, pools.window_SRC, pools.delta_SHKV, weights.conv_CJ.view(torch.int64),
        weights.a_log_H, weights.dt_bias, weights.norm_V, out_THV, slots.read_B, slots.write_BN,
        slots.length_B,
    )  # fmt: skip
    numbers = (*(x.stride(0) for x in rows), count, weights.eps, bound)
    ratio, gate = heads // pools.key_heads, GATES[weights.gate_type]
    values = constants(tokens, ratio, key_dim, value_dim, decay, gate)
    options = {"num_warps": WARPS, "num_stages": STAGES}
    if tokens == 1:
        delta_decode[(heads * SPLIT, sequences)](
            *given, words, counters, *numbers, **values, **options
        )
    else:
        delta_step[(heads, sequences)](*given, counters, *numbers, **values, **options)
    return out_THV


def _workspace(
    given: torch.Tensor | None, sequences: int, pools: Pools
) -> tuple[torch.Tensor, torch.Tensor]:
    """Words that two programs of a head exchange, and counters of the readers of a window."""
    workspace = new_workspace(sequences, pools) if given is None else given
    assert workspace.dtype == torch.int32
    assert workspace.numel() >= workspace_of(sequences, pools)
    size = words_of(sequences, pools)
    return workspace[:size].view(torch.int64), workspace[size:]
