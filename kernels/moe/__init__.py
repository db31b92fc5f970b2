"""Mixture of experts: routing and the routed experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels import backend
from kernels.humming.matrix import HummingMatrix
from kernels.moe import reference
from kernels.quant_linear.matrix import Matrix

if TYPE_CHECKING:
    from kernels.moe.launch import Scratch

# Legend: T tokens, E experts, k experts of a token, H hidden, I intermediate.


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts `first_expert` to `first_expert + E` of a layer, as stored.

    `gate_up` is a stack [E, 2 I, H], the gate rows before the up rows; `down` is [E, H, I].
    `total` is the number of experts of the layer on all ranks, 0 where there is one rank: only the
    choice of tiles on a GPU depends on it.
    """

    gate_up: Matrix
    down: Matrix
    count: int
    first_expert: int = 0
    total: int = 0


def route(
    logits_TE: torch.Tensor, top_k: int, *, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token: ids int64 [T, k] and weights fp32 [T, k], best first.

    Softmax over all experts of fp32 logits [T, E], then the k largest; among equals the lower id.
    `normalise` divides the weights by their sum. Source: Qwen4-Exp top-k router.
    """
    assert logits_TE.dtype == torch.float32 and top_k <= logits_TE.shape[1]
    if backend.uses_triton(logits_TE):
        from kernels.router import launch

        return launch.route_softmax(logits_TE, top_k, normalise)
    return reference.route(logits_TE, top_k, normalise)


def routed_experts(
    x_TH: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    experts: ExpertWeights,
    *,
    limit: float | None = None,
    out: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """sum_j w_j down_j(silu(gate_j x) * up_j x) over a token's experts, fp32 [T, H].

    x [T, H], ids int64 [T, k], weights fp32 [T, k]. Experts that this rank does not hold
    contribute nothing, so the sum over ranks is the layer's output. Summed in the order of ids.
    With `limit` gate_j x is cut to at most `limit` and up_j x to -limit..limit before the SiLU
    (DeepSeek-V4, GLM). Written to `out` fp32 [T, H] where it is given.

    On a GPU quantised weights must come from `prepare`, x and the products of the first matrix are
    rounded to bf16, and a token's result depends on the token and on the number of tokens, whose
    range picks the kernels. Without `scratch` (see launch.Scratch) memory is allocated.
    """
    assert ids_Tk.shape == weights_Tk.shape and x_TH.shape[0] == ids_Tk.shape[0]
    if not backend.uses_triton(x_TH):
        y = reference.routed_experts(x_TH, ids_Tk, weights_Tk, experts, limit)
        return y if out is None else out.copy_(y)
    if out is None:
        out = torch.empty(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    if isinstance(experts.gate_up, HummingMatrix):
        from kernels.humming import launch as humming

        ids, weights = ids_Tk.contiguous(), weights_Tk.contiguous()
        return humming.routed_experts(x_TH, ids, weights, experts, limit, out)
    from kernels.moe import launch

    return launch.routed_experts(
        x_TH.contiguous(),
        ids_Tk.contiguous(),
        weights_Tk.contiguous(),
        experts,
        limit,
        out,
        scratch,
    )
