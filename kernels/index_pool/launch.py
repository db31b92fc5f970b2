"""Launches of the Triton kernels; scores and selection are those of `kernels.lightning_index`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.hadamard import hadamard
from kernels.index_pool.triton import pool_keys as pool_kernel
from kernels.index_pool.triton import write_pools as write_kernel
from kernels.lightning_index import launch as index

if TYPE_CHECKING:
    from kernels.index_pool import KeyPool

ELEMENTS = 1024  # of a program
WARPS, STAGES = 4, 1


def pool_keys(
    keys_TRD: torch.Tensor, gates_TRD: torch.Tensor, bias_RD: torch.Tensor
) -> torch.Tensor:
    """See the package. Both [T, R, D] may be columns of one tensor; no host synchronisation."""
    tokens, ratio, width = keys_TRD.shape
    out_TD = torch.empty(tokens, width, dtype=keys_TRD.dtype, device=keys_TRD.device)
    if tokens == 0:
        return out_TD
    keys_TRD, gates_TRD = _rows(keys_TRD), _rows(gates_TRD)
    values = pool_constants(ratio, width)
    pool_kernel[(-(-tokens // values["BT"]),)](
        keys_TRD, gates_TRD, bias_RD.contiguous(), out_TD, tokens, keys_TRD.stride(1),
        gates_TRD.stride(1), **values, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out_TD


def _rows(x_TRD: torch.Tensor) -> torch.Tensor:
    """Itself where its rows lie at one stride."""
    fits = x_TRD.stride(2) == 1 and x_TRD.stride(0) == x_TRD.shape[1] * x_TRD.stride(1)
    return x_TRD if fits else x_TRD.contiguous()


def write_pools(
    keys_TD: torch.Tensor,
    pool: KeyPool,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
) -> None:
    """See the package. No host synchronisation; can be captured in a CUDA graph."""
    tokens, width = keys_TD.shape
    pages, per_page, _ = pool.values.shape
    assert keys_TD.is_contiguous() and pool.values.is_contiguous() and page_table_BP.is_contiguous()
    assert per_page & (per_page - 1) == 0, "a page holds a power of two of keys"
    assert pool.scale is None or (pool.scale.is_contiguous() and width & (width - 1) == 0)
    if tokens == 0:
        return
    values = write_constants(width, ratio, coded=pool.scale is not None)
    write_kernel[(-(-tokens // int(values["BT"])),)](
        keys_TD, pool.values, pool.values if pool.scale is None else pool.scale, page_table_BP,
        sequence_T, positions_T, tokens, *page_table_BP.shape, pages, per_page.bit_length() - 1,
        **values, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def select_pools(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    pool: KeyPool,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
    budget: int,
) -> torch.Tensor:
    """See the package. q, and the rotated q, are rounded to bf16."""
    q_THD = q_THD.contiguous() if pool.scale is None else hadamard(q_THD)
    factor = q_THD.shape[2] ** -0.5
    queries = index.Queries(q_THD, weights_TH, sequence_T, positions_T, factor, ratio)
    keys = index.Keys(pool.values, page_table_BP, None, pool.scale)
    return index.select_pools(queries, keys, budget)


def padded(width: int) -> int:
    return 1 << (width - 1).bit_length()


def pool_constants(ratio: int, width: int) -> dict[str, int]:
    """The constants of `pool_keys`."""
    wide = padded(width)
    return {"R": ratio, "D": width, "DP": wide, "BT": max(1, ELEMENTS // wide)}


def write_constants(width: int, ratio: int, *, coded: bool) -> dict[str, int | bool]:
    """The constants of `write_pools`."""
    wide = padded(width)
    return {
        "D": width,
        "DP": wide,
        "LOG": wide.bit_length() - 1,
        "RATIO": ratio,
        "CODED": coded,
        "BT": max(1, ELEMENTS // wide),
    }
