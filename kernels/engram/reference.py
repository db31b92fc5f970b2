from __future__ import annotations

import torch

from kernels.activation.reference import sigmoid
from kernels.quant_linear.reference import decode_e4m3, scale_values

_GROUP = 32
_LEAST_DOT = 1e-6


def decode_rows(rows_TB: torch.Tensor, heads: int) -> torch.Tensor:
    rows_ThB = rows_TB.view(rows_TB.shape[0], heads, -1)
    groups = rows_ThB.shape[2] // (_GROUP + 1)
    codes, scales = rows_ThB.split([groups * _GROUP, groups], dim=2)
    values: torch.Tensor = decode_e4m3(codes.contiguous()).unflatten(2, (groups, _GROUP))
    return (values * scale_values(scales)[..., None]).flatten(1)


def gather_rows(table_RB: torch.Tensor, ids_Th: torch.Tensor) -> torch.Tensor:
    known_Th = (ids_Th >= 0) & (ids_Th < table_RB.shape[0])
    ids_Th = ids_Th.clamp(0, table_RB.shape[0] - 1)
    rows_ThB = table_RB[ids_Th].masked_fill_(~known_Th[..., None], 0)
    return decode_rows(rows_ThB.flatten(1), ids_Th.shape[1])


def engram_gate(
    streams_TnD: torch.Tensor,
    keys_TnD: torch.Tensor,
    value_TD: torch.Tensor,
    q_nD: torch.Tensor,
    k_nD: torch.Tensor,
    closed_T: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    x, key = streams_TnD.float(), keys_TnD.float()
    product = x * (q_nD.float() * k_nD.float()) * key
    dot_Tn = product.sum(-1) * _inverse_rms(x, eps) * _inverse_rms(key, eps)
    dot_Tn = dot_Tn * x.shape[2] ** -0.5
    gate_Tn = sigmoid(torch.copysign(dot_Tn.abs().clamp_min(_LEAST_DOT).sqrt(), dot_Tn))
    if closed_T is not None:
        gate_Tn = gate_Tn.masked_fill(closed_T[:, None], 0.0)
    return x + gate_Tn[..., None] * value_TD.float()[:, None]


def _inverse_rms(x_TnD: torch.Tensor, eps: float) -> torch.Tensor:
    return x_TnD.square().mean(-1).add_(eps).rsqrt_()
