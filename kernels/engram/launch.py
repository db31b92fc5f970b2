"""Launches of the Triton kernels: checks and constants. None synchronises with the host."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.engram.triton import gate, gather_bytes, gather_words

# Legend: T tokens, h rows of a token, R rows of the table, B bytes of a row, n streams, D hidden.

GROUP = 32
TILE, GATHER_WARPS = 8, 4  # rows of a program: some 2 KB on their way
GATE_WARPS = 8
WORD = 8


def power_of_two(value: int) -> int:
    """The least power of two that is not below `value` >= 1."""
    return 1 << (value - 1).bit_length()


def gather_rows(
    table_RB: torch.Tensor,
    ids_Th: torch.Tensor,
    out_TE: torch.Tensor,
    *,
    scaled: bool,
    scale: float = 1.0,
) -> torch.Tensor:
    """Fill `out` [T, h * values], contiguous, of any float type: one launch."""
    assert ids_Th.dtype == torch.int64 and ids_Th.is_contiguous()
    assert table_RB.is_cuda or backend.interpreted() or table_RB.is_pinned()
    return _gather(table_RB, ids_Th, out_TE, ids_Th.numel(), scaled=scaled, scale=scale)


def decode_rows(rows_TB: torch.Tensor, heads: int, out_TE: torch.Tensor) -> torch.Tensor:
    """The same of rows that lie one after the other: [T, heads * B]."""
    assert rows_TB.is_contiguous()
    table_RB = rows_TB.view(rows_TB.shape[0] * heads, rows_TB.shape[1] // heads)
    return _gather(table_RB, None, out_TE, len(table_RB), scaled=True, scale=1.0)


def gather_constants(
    row_bytes: int, *, scaled: bool, listed: bool, aligned: bool
) -> dict[str, int | bool]:
    """Of the kernel of words where rows are whole words, or of the kernel of bytes."""
    values = row_bytes // (GROUP + 1) * GROUP if scaled else row_bytes
    flags = {"TILE": TILE, "SCALED": scaled, "LISTED": listed}
    if whole_words(row_bytes, scaled=scaled) and aligned:
        words = values // WORD
        sizes = {"WORDS": words, "ROW_WORDS": row_bytes // WORD, "PADDED": power_of_two(words)}
    else:
        sizes = {"VALUES": values, "ROW_BYTES": row_bytes, "PADDED": power_of_two(values)}
    return sizes | flags


def whole_words(row_bytes: int, *, scaled: bool) -> bool:
    """Whether codes, and scales behind them, fill words of 8 bytes."""
    groups = row_bytes // (GROUP + 1)
    return row_bytes % WORD == 0 and not (scaled and groups % WORD)


def _gather(
    table_RB: torch.Tensor,
    ids_Th: torch.Tensor | None,
    out_TE: torch.Tensor,
    count: int,
    *,
    scaled: bool,
    scale: float,
) -> torch.Tensor:
    rows, row_bytes = table_RB.shape
    assert table_RB.dtype == torch.uint8 and table_RB.is_contiguous() and out_TE.is_contiguous()
    address = table_RB.data_ptr()
    constants = gather_constants(
        row_bytes, scaled=scaled, listed=ids_Th is not None, aligned=address % WORD == 0
    )
    values = constants.get("VALUES") or constants["WORDS"] * WORD
    assert out_TE.numel() == count * values
    if count == 0:
        return out_TE
    kernel = gather_words if "WORDS" in constants else gather_bytes
    ids = out_TE if ids_Th is None else ids_Th  # out: not read
    grid = (-(-count // TILE),)
    kernel[grid](address, ids, out_TE, rows, count, scale, **constants, num_warps=GATHER_WARPS)
    return out_TE


def engram_gate(
    streams_TnD: torch.Tensor,
    keys_TnD: torch.Tensor,
    value_TD: torch.Tensor,
    q_nD: torch.Tensor,
    k_nD: torch.Tensor,
    closed_T: torch.Tensor | None,
    out_TnD: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Fill `out` [T, n, D], contiguous, of any float type: one launch.

    Rows of D values are contiguous; tokens and streams may have any stride.
    """
    tokens, streams, width = streams_TnD.shape
    assert all(x.stride(-1) == 1 for x in (streams_TnD, keys_TnD, value_TD))
    assert q_nD.is_contiguous() and k_nD.is_contiguous() and out_TnD.is_contiguous()
    assert out_TnD.shape == streams_TnD.shape
    assert closed_T is None or (closed_T.shape == (tokens,) and closed_T.is_contiguous())
    if tokens == 0:
        return out_TnD
    closed = out_TnD if closed_T is None else closed_T.view(torch.uint8)  # out: not read
    gate[(tokens * streams,)](
        streams_TnD, keys_TnD, value_TD, q_nD, k_nD, closed, out_TnD, streams_TnD.stride(0),
        streams_TnD.stride(1), keys_TnD.stride(0), keys_TnD.stride(1), value_TD.stride(0), width,
        eps, width**-0.5, **gate_constants(streams, width, closed=closed_T is not None),
        num_warps=GATE_WARPS,
    )  # fmt: skip
    return out_TnD


def gate_constants(streams: int, width: int, *, closed: bool) -> dict[str, int | bool]:
    return {"STREAMS": streams, "BLOCK": power_of_two(width), "CLOSED": closed}
