from __future__ import annotations

import torch


def embedding(ids_T: torch.Tensor, table_VD: torch.Tensor, first_row: int) -> torch.Tensor:
    local_T = ids_T - first_row
    inside_T = (local_T >= 0) & (local_T < table_VD.shape[0])
    rows_TD = table_VD.index_select(0, local_T.clamp(0, table_VD.shape[0] - 1))
    return torch.where(inside_T[:, None], rows_TD, rows_TD.new_zeros(()))
