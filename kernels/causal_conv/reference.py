from __future__ import annotations

import torch

from kernels.activation.reference import silu


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
    taps_TJC = taps.view(*rows_TJ.shape, -1) * weight_CJ.float().t()
    total = taps_TJC[:, 0]
    for j in range(1, weight_CJ.shape[1]):
        total = total + taps_TJC[:, j]
    return silu(total).to(history_RC.dtype)
