"""Depthwise causal convolution over packed sequences, with its window as the state."""

from __future__ import annotations

import torch

from kernels.causal_conv import reference

# Legend: T packed tokens, N tokens among them, B sequences, C channels, J taps,
# S = (J - 1) * dilation rows of a window, R = B * S + T rows of history.


def history(x_TC: torch.Tensor, window_BSC: torch.Tensor) -> torch.Tensor:
    """All windows, then all new rows: [B * S + T, C] in the type of x.

    `window` holds the S rows before each sequence's first token, oldest first (zeros before the
    start of the sequence).
    """
    assert x_TC.shape[1] == window_BSC.shape[2]
    return reference.history(x_TC, window_BSC)


def history_rows(
    token_N: torch.Tensor,
    sequence_N: torch.Tensor,
    offset_N: torch.Tensor,
    *,
    sequences: int,
    window: int,
    delays: tuple[int, ...],
) -> torch.Tensor:
    """Rows of the history that lie `delays` tokens before packed tokens: int64 [N, len(delays)].

    `sequence` names a token's sequence and `offset` its place within that sequence's part of the
    step, all int64 [N]; there are `sequences` windows of `window` rows each.
    """
    assert all(0 <= d <= window for d in delays)
    return reference.history_rows(token_N, sequence_N, offset_N, sequences, window, delays)


def causal_conv(
    history_RC: torch.Tensor, rows_TJ: torch.Tensor, weight_CJ: torch.Tensor
) -> torch.Tensor:
    """silu(sum_j weight[:, j] * history[rows[t, j]]) per channel: [T, C] in the type of history.

    Tap j of J reads the row (J - 1 - j) * dilation tokens before. Computed in fp32.
    Source: gated delta net and PLE convolutions of Qwen3.5 and Qwen4-Exp.
    """
    assert rows_TJ.shape[1] == weight_CJ.shape[1] and history_RC.shape[1] == weight_CJ.shape[0]
    return reference.causal_conv(history_RC, rows_TJ, weight_CJ)
