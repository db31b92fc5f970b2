from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.activation.reference import silu_and_mul
from kernels.quant_linear.reference import linear

if TYPE_CHECKING:
    from kernels.moe import ExpertWeights


def route(
    logits_TE: torch.Tensor, top_k: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    probabilities_TE = torch.softmax(logits_TE, dim=-1)
    weights, ids = torch.sort(probabilities_TE, dim=-1, descending=True, stable=True)
    weights_Tk, ids_Tk = weights[:, :top_k], ids[:, :top_k]
    if normalise:
        weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
    return ids_Tk, weights_Tk


def routed_experts(
    x_TH: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    experts: ExpertWeights,
    limit: float | None,
) -> torch.Tensor:
    tokens, top_k = ids_Tk.shape
    x = x_TH.float()
    out_PH = x.new_zeros(tokens * top_k, x.shape[1])
    for expert, pairs in _pairs_by_expert(ids_Tk, experts.first_expert, experts.count):
        rows = x.index_select(0, pairs // top_k)
        gate, up = linear(rows, experts.gate_up.expert(expert)).chunk(2, dim=1)
        hidden = silu_and_mul(gate, up, limit)
        out_PH.index_copy_(0, pairs, linear(hidden, experts.down.expert(expert)))
    scaled = out_PH.view(tokens, top_k, x.shape[1]) * weights_Tk[..., None]
    total = scaled[:, 0]
    for j in range(1, top_k):
        total = total + scaled[:, j]
    return total


def _pairs_by_expert(
    ids_Tk: torch.Tensor, first: int, count: int
) -> list[tuple[int, torch.Tensor]]:
    """(expert within this rank, int64 numbers t * k + j of the pairs that it computes)."""
    chosen: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids_Tk.flatten().tolist()):
        if first <= expert < first + count:
            chosen.setdefault(expert - first, []).append(pair)
    return [(e, torch.tensor(chosen[e], device=ids_Tk.device)) for e in sorted(chosen)]
