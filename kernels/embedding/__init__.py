"""Rows of a vocabulary table."""

from __future__ import annotations

import torch

from kernels.embedding import reference


def embedding(ids_T: torch.Tensor, table_VD: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """Rows `ids - first_row` of a table [V, D]; zeros for ids outside this slice of the vocabulary.

    ids int64 [T]; returns [T, D] in the type of the table. Slices of all ranks add up to the row.
    """
    assert ids_T.dtype == torch.int64 and table_VD.dim() == 2
    return reference.embedding(ids_T, table_VD, first_row)
