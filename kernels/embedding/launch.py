"""Launch of the Triton kernel."""

from __future__ import annotations

import torch

from kernels.embedding.triton import embed

BLOCK, WARPS = 1024, 4


def embedding(
    ids_T: torch.Tensor, table_VD: torch.Tensor, first_row: int, out_TD: torch.Tensor
) -> torch.Tensor:
    """Fill `out` [T, D], contiguous, of any float type: one launch, no synchronisation."""
    tokens, width = out_TD.shape
    assert ids_T.is_contiguous() and table_VD.is_contiguous() and out_TD.is_contiguous()
    assert ids_T.shape == (tokens,) and table_VD.shape[1] == width
    if tokens:
        embed[(tokens, -(-width // BLOCK))](
            ids_T, table_VD, out_TD, table_VD.shape[0], first_row, width, BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    return out_TD
