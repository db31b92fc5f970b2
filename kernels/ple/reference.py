from __future__ import annotations

import torch

from kernels.activation.reference import sigmoid
from kernels.quant_linear.reference import decode_e4m3


def ngram_row_ids(
    history_TN: torch.Tensor,
    multipliers_N: torch.Tensor,
    head_sizes_h: torch.Tensor,
    head_offsets_h: torch.Tensor,
    eos: int,
) -> torch.Tensor:
    before = history_TN[:, 1:]
    cut = ((before < 0) | (before == eos)).cummax(dim=1).values
    codes_TN = torch.cat([history_TN[:, :1], torch.where(cut, eos, before)], dim=1)
    return hashed_rows(codes_TN, multipliers_N, head_sizes_h, head_offsets_h)


def hashed_rows(
    codes_TN: torch.Tensor,
    multipliers_N: torch.Tensor,
    head_sizes_h: torch.Tensor,
    head_offsets_h: torch.Tensor,
) -> torch.Tensor:
    order = codes_TN.shape[1]
    per_order = len(head_sizes_h) // (order - 1)
    mixed = codes_TN[:, 0] * multipliers_N[0]
    rows = []
    for s in range(1, order):
        mixed = mixed ^ (codes_TN[:, s] * multipliers_N[s])
        heads = slice((s - 1) * per_order, s * per_order)
        rows.append(mixed[:, None] % head_sizes_h[heads] + head_offsets_h[heads])
    return torch.cat(rows, dim=1)


def ple_gate(
    key_TX: torch.Tensor, query_TX: torch.Tensor, value_TH: torch.Tensor, count: int
) -> torch.Tensor:
    hidden = value_TH.shape[1]
    product = (key_TX.float() * query_TX.float()).view(-1, count, hidden)
    raw_TC = product.sum(-1).mul_(hidden**-0.5)
    gate_TC = sigmoid(raw_TC.abs().clamp_min_(1e-6).sqrt_().mul_(raw_TC.sign()))
    return (gate_TC[..., None] * value_TH.float()[:, None]).flatten(1)


def gather_rows(table_RB: torch.Tensor, ids_Th: torch.Tensor, scale: float) -> torch.Tensor:
    known_Th = (ids_Th >= 0) & (ids_Th < table_RB.shape[0])
    codes_ThB = table_RB[ids_Th.clamp(0, table_RB.shape[0] - 1)]
    codes_ThB = codes_ThB.masked_fill(~known_Th[..., None], 0)
    return (decode_e4m3(codes_ThB) * scale).flatten(1)
