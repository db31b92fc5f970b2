from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.activation.reference import silu

if TYPE_CHECKING:
    from kernels.causal_conv import Packed


def history(x_TC: torch.Tensor, window_BSC: torch.Tensor) -> torch.Tensor:
    return torch.cat([window_BSC.flatten(0, 1).to(x_TC.dtype), x_TC])


def history_rows(
    token_N: torch.Tensor,
    sequence_N: torch.Tensor,
    offset_N: torch.Tensor,
    sequences: int,
    window: int,
    delays: tuple[int, ...],
) -> torch.Tensor:
    delay_J = torch.tensor(delays, device=token_N.device)
    offset_NJ = offset_N[:, None] - delay_J
    in_window = (sequence_N + 1)[:, None] * window + offset_NJ
    in_step = token_N[:, None] + (sequences * window - delay_J)
    return torch.where(offset_NJ >= 0, in_step, in_window)


def causal_conv(
    history_RC: torch.Tensor, rows_TJ: torch.Tensor, weight_CJ: torch.Tensor
) -> torch.Tensor:
    """Taps are added one after the other: the same order for every token."""
    taps = history_RC.index_select(0, rows_TJ.flatten()).float()
    taps_TJC = taps.view(*rows_TJ.shape, history_RC.shape[1]) * weight_CJ.float().t()
    total = taps_TJC[:, 0]
    for j in range(1, weight_CJ.shape[1]):
        total = total + taps_TJC[:, j]
    return silu(total).to(history_RC.dtype)


def conv_packed(
    x_TC: torch.Tensor,
    pool_PSC: torch.Tensor,
    weight_CJ: torch.Tensor,
    packed: Packed,
    dilation: int,
) -> torch.Tensor:
    slots, window = pool_PSC.shape[:2]
    known_B = (packed.read_B >= 0) & (packed.read_B < slots)
    window_BSC = pool_PSC[torch.where(known_B, packed.read_B, 0)]
    past_RC = history(x_TC, window_BSC.masked_fill_(~known_B[:, None, None], 0))
    rows_TS = history_rows(
        torch.arange(len(x_TC)),
        packed.sequence_T,
        packed.offset_T,
        len(known_B),
        window,
        tuple(range(window, -1, -1)),
    )
    token_W, slot_W = packed.write_token_W, packed.write_slot_W
    stored_W = (slot_W >= 0) & (slot_W < slots) & (token_W >= 0) & (token_W < len(x_TC))
    pool_PSC[slot_W[stored_W]] = past_RC[rows_TS[token_W[stored_W], 1:]]
    return causal_conv(past_RC, rows_TS[:, ::dilation], weight_CJ)
