"""Launches of the Triton kernels: one each. None synchronises with the host."""

from __future__ import annotations

import torch

from kernels.ple.triton import gate, hash_rows

TILE, HASH_WARPS = 8, 4
GATE_WARPS = 8


def power_of_two(value: int) -> int:
    """The least power of two that is not below `value` >= 1."""
    return 1 << (value - 1).bit_length()


def hashed_rows(
    codes_TN: torch.Tensor,
    multipliers_N: torch.Tensor,
    head_sizes_h: torch.Tensor,
    head_offsets_h: torch.Tensor,
    eos: int | None = None,
) -> torch.Tensor:
    """See `kernels.ple.hashed_rows`; with `eos`, `kernels.ple.ngram_row_ids`."""
    tokens, order = codes_TN.shape
    heads = len(head_sizes_h)
    constants = (multipliers_N, head_sizes_h, head_offsets_h)
    assert all(x.dtype == torch.int64 and x.is_contiguous() for x in (codes_TN, *constants))
    rows_Th = torch.empty(tokens, heads, dtype=torch.int64, device=codes_TN.device)
    if tokens:
        hash_rows[(-(-tokens // TILE),)](
            codes_TN, *constants, rows_Th, tokens, 0 if eos is None else eos,
            **hash_constants(order, heads, cut=eos is not None), num_warps=HASH_WARPS,
        )  # fmt: skip
    return rows_Th


def hash_constants(order: int, heads: int, *, cut: bool) -> dict[str, int | bool]:
    return {"N": order, "HEADS": heads, "PADDED": power_of_two(heads), "TILE": TILE, "CUT": cut}


def ple_gate(
    key_TX: torch.Tensor,
    query_TX: torch.Tensor,
    value_TH: torch.Tensor,
    count: int,
    out_TX: torch.Tensor,
) -> torch.Tensor:
    """Fill `out` [T, C * H], contiguous, of any float type."""
    tokens, width = value_TH.shape
    assert all(x.stride(1) == 1 for x in (key_TX, query_TX, value_TH))
    assert out_TX.is_contiguous() and out_TX.shape == key_TX.shape == query_TX.shape
    if tokens:
        gate[(tokens * count,)](
            key_TX, query_TX, value_TH, out_TX, key_TX.stride(0), query_TX.stride(0),
            value_TH.stride(0), width, width**-0.5, COUNT=count, BLOCK=power_of_two(width),
            num_warps=GATE_WARPS,
        )  # fmt: skip
    return out_TX
