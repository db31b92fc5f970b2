"""Depthwise causal convolution over packed sequences, with its window as the state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import backend
from kernels.causal_conv import reference

# Legend: T packed tokens, N tokens among them, B sequences, C channels, J taps,
# S = (J - 1) * dilation rows of a window, R = B * S + T rows of history, W writes.


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the sequences of a step lie, start and leave windows; int64, on one device.

    A token's sequence and its place within that sequence's part of the step; the slot of each
    sequence's window; writes of the window that ends with a token of a sequence to a slot. Slots
    outside the pool are read as zeros and not written. The slots that one sequence writes differ
    from each other; no other sequence reads or writes them.
    """

    sequence_T: torch.Tensor
    offset_T: torch.Tensor
    read_B: torch.Tensor
    write_token_W: torch.Tensor
    write_sequence_W: torch.Tensor
    write_slot_W: torch.Tensor

    def __post_init__(self) -> None:
        writes = (self.write_token_W, self.write_sequence_W, self.write_slot_W)
        given = (self.sequence_T, self.offset_T, self.read_B, *writes)
        assert all(x.dtype == torch.int64 and x.is_contiguous() for x in given)
        assert self.sequence_T.shape == self.offset_T.shape
        assert len({x.shape for x in writes}) == 1


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
    if backend.uses_triton(token_N):
        from kernels.causal_conv import launch

        return launch.history_rows(token_N, sequence_N, offset_N, sequences, window, delays)
    return reference.history_rows(token_N, sequence_N, offset_N, sequences, window, delays)


def causal_conv(
    history_RC: torch.Tensor, rows_TJ: torch.Tensor, weight_CJ: torch.Tensor
) -> torch.Tensor:
    """silu(sum_j weight[:, j] * history[rows[t, j]]) per channel: [T, C] in the type of history.

    Tap j of J reads the row (J - 1 - j) * dilation tokens before. Computed in fp32.
    Source: gated delta net and PLE convolutions of Qwen3.5 and Qwen4-Exp.
    """
    assert rows_TJ.shape[1] == weight_CJ.shape[1] and history_RC.shape[1] == weight_CJ.shape[0]
    if backend.uses_triton(history_RC):
        from kernels.causal_conv import launch

        return launch.causal_conv(history_RC, rows_TJ, weight_CJ)
    return reference.causal_conv(history_RC, rows_TJ, weight_CJ)


def conv_packed(
    x_TC: torch.Tensor,
    pool_PSC: torch.Tensor,
    weight_CJ: torch.Tensor,
    packed: Packed,
    *,
    dilation: int = 1,
) -> torch.Tensor:
    """`causal_conv` of packed tokens, with windows read from and written to `pool` [P, S, C].

    The same values as through `history`, which is not made. The pool has the type of x. Returns
    [T, C] in that type. A token's result does not depend on other sequences.
    """
    assert x_TC.shape[1] == pool_PSC.shape[2] == weight_CJ.shape[0]
    assert pool_PSC.shape[1] == (weight_CJ.shape[1] - 1) * dilation and dilation >= 1
    assert len(x_TC) == len(packed.sequence_T) and x_TC.dtype == pool_PSC.dtype
    if backend.uses_triton(x_TC):
        from kernels.causal_conv import launch

        return launch.conv_packed(x_TC, pool_PSC, weight_CJ, packed, dilation)
    return reference.conv_packed(x_TC, pool_PSC, weight_CJ, packed, dilation)
