"""Launches of the Triton kernels. None synchronises with the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.causal_conv import triton as kernels

if TYPE_CHECKING:
    from kernels.causal_conv import Packed

WARPS, STAGES = 4, 1
ROWS_BLOCK = 256
FEW_TOKENS = 16
WRITES = 64  # looked at together


def history_rows(
    token_N: torch.Tensor,
    sequence_N: torch.Tensor,
    offset_N: torch.Tensor,
    sequences: int,
    window: int,
    delays: tuple[int, ...],
) -> torch.Tensor:
    """One launch; the delays must be evenly spaced."""
    count, taps = len(token_N), len(delays)
    step = delays[0] - delays[1] if taps > 1 else 0
    assert all(delay == delays[0] - j * step for j, delay in enumerate(delays))
    given = (token_N, sequence_N, offset_N)
    assert all(x.dtype == torch.int64 and x.is_contiguous() for x in given)
    rows_NJ = torch.empty(count, taps, dtype=torch.int64, device=token_N.device)
    if count:
        kernels.history_rows[(-(-count * taps // ROWS_BLOCK),)](
            *given, rows_NJ, count, sequences * window, delays[0], step,
            **history_constants(window, taps), num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return rows_NJ


def history_constants(window: int, delays: int) -> dict[str, int | bool]:
    return {"S": window, "J": delays, "BLOCK": ROWS_BLOCK}


def causal_conv(
    history_RC: torch.Tensor, rows_TJ: torch.Tensor, weight_CJ: torch.Tensor
) -> torch.Tensor:
    """One launch."""
    tokens, taps = rows_TJ.shape
    rows, channels = history_RC.shape
    assert all(x.is_contiguous() for x in (history_RC, rows_TJ, weight_CJ))
    out_TC = torch.empty(tokens, channels, dtype=history_RC.dtype, device=history_RC.device)
    if tokens:
        values = tile(tokens)
        kernels.conv_rows[grid(tokens, channels)](
            history_RC, rows_TJ, weight_CJ, out_TC, tokens, rows, channels, J=taps, **values,
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out_TC


def conv_packed(
    x_TC: torch.Tensor,
    pool_PSC: torch.Tensor,
    weight_CJ: torch.Tensor,
    packed: Packed,
    dilation: int,
) -> torch.Tensor:
    """Two launches: outputs, which read windows, and then new windows."""
    tokens, channels = x_TC.shape
    slots, window = pool_PSC.shape[:2]
    taps, sequences, writes = weight_CJ.shape[1], len(packed.read_B), len(packed.write_token_W)
    assert x_TC.stride(1) == 1 and pool_PSC.is_contiguous() and weight_CJ.is_contiguous()
    out_TC = torch.empty(tokens, channels, dtype=x_TC.dtype, device=x_TC.device)
    if tokens:
        kernels.conv_packed[packed_grid(tokens, channels, dilation)](
            x_TC, pool_PSC, weight_CJ, out_TC, packed.sequence_T, packed.offset_T, packed.read_B,
            tokens, sequences, slots, channels, x_TC.stride(0), J=taps, D=dilation,
            **packed_tile(tokens), num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    if tokens and writes:
        values = window_tile(window)
        kernels.write_windows[(sequences, -(-channels // values["BC"]))](
            x_TC, pool_PSC, packed.offset_T, packed.read_B, packed.write_token_W,
            packed.write_sequence_W, packed.write_slot_W, tokens, writes, slots, channels,
            x_TC.stride(0), **values, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out_TC


def tile(tokens: int) -> dict[str, int]:
    """Tokens and channels of a program; results do not depend on it."""
    return {"BT": 2, "BC": 256} if tokens <= FEW_TOKENS else {"BT": 32, "BC": 128}


def grid(tokens: int, channels: int) -> tuple[int, int]:
    values = tile(tokens)
    return -(-tokens // values["BT"]), -(-channels // values["BC"])


def packed_tile(tokens: int) -> dict[str, int]:
    """Rows of tokens, tokens of a row and channels of a program of `conv_packed`."""
    return {"P": 2, "L": 1, "BC": 256} if tokens <= FEW_TOKENS else {"P": 4, "L": 16, "BC": 256}


def packed_grid(tokens: int, channels: int, dilation: int) -> tuple[int, int]:
    values = packed_tile(tokens)
    rows = -(-tokens // (values["L"] * dilation)) * dilation
    return -(-rows // values["P"]), -(-channels // values["BC"])


def window_tile(window: int) -> dict[str, int]:
    """The constants of `write_windows` for windows of so many rows."""
    rows = 1 << (window - 1).bit_length()
    return {"S": window, "ROWS": rows, "BC": max(64, 4096 // rows), "BW": WRITES}
