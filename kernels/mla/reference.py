from __future__ import annotations

import torch

from kernels.quant_linear.matrix import Matrix
from kernels.quant_linear.reference import ROW_TILE, dequantize


def absorb_queries(q_THK: torch.Tensor, kv_b: Matrix) -> torch.Tensor:
    heads, width = q_THK.shape[1:]
    keys_HKC = dequantize(kv_b).view(heads, -1, kv_b.in_features)[:, :width]
    return _per_head(q_THK, keys_HKC)


def expand_values(o_THC: torch.Tensor, kv_b: Matrix, value_dim: int) -> torch.Tensor:
    heads, latent = o_THC.shape[1:]
    values_HVC = dequantize(kv_b).view(heads, -1, latent)[:, -value_dim:]
    return _per_head(o_THC, values_HVC.transpose(1, 2))


def _per_head(x_THK: torch.Tensor, w_HKN: torch.Tensor) -> torch.Tensor:
    """x_h w_h for every head, always with the same number of rows: a row never sees the others."""
    rows, heads, width = x_THK.shape
    missing = -rows % ROW_TILE
    x_HTK = torch.cat([x_THK.float(), x_THK.new_zeros(missing, heads, width).float()])
    x_HTK = x_HTK.transpose(0, 1).contiguous()
    tiles = [torch.bmm(x_HTK[:, row : row + ROW_TILE], w_HKN) for row in range(0, rows, ROW_TILE)]
    return torch.cat(tiles, dim=1)[:, :rows].transpose(0, 1).to(x_THK.dtype)


def mla_attention(
    q_THC: torch.Tensor,
    latents_PNC: torch.Tensor,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    scale: float,
    selected_TS: torch.Tensor,
) -> torch.Tensor:
    per_page, latents = latents_PNC.shape[1], latents_PNC.flatten(0, 1)
    out = torch.empty_like(q_THC, dtype=torch.float32)
    for t, b in enumerate(sequence_T.tolist()):
        visible = selected_TS[t]
        visible = visible[visible >= 0]
        pages = page_table_BP[b].index_select(0, visible // per_page)
        latents_LC = latents.index_select(0, pages * per_page + visible % per_page).float()
        scores_HL = torch.mm(q_THC[t].float(), latents_LC.t()).mul_(scale)
        torch.mm(torch.softmax(scores_HL, dim=-1), latents_LC, out=out[t])
    return out.to(q_THC.dtype)
