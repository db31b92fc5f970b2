"""Rows of a vocabulary table."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.embedding import reference


def embedding(ids_T: torch.Tensor, table_VD: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """Rows `ids - first_row` of a table [V, D]; zeros for ids outside this slice of the vocabulary.

    ids int64 [T]; returns [T, D] in the type of the table. Slices of all ranks add up to the row.
    """
    assert ids_T.dtype == torch.int64 and table_VD.dim() == 2
    if backend.uses_triton(table_VD):
        from kernels.embedding import launch

        shape = (len(ids_T), table_VD.shape[1])
        out_TD = torch.empty(shape, dtype=table_VD.dtype, device=table_VD.device)
        return launch.embedding(ids_T.contiguous(), table_VD, first_row, out_TD)
    return reference.embedding(ids_T, table_VD, first_row)
