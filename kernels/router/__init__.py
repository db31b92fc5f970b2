"""Expert choice by independent scores with a correction bias (noaux_tc)."""

from __future__ import annotations

from typing import Literal

import torch

from kernels import backend
from kernels.router import reference

# Legend: T tokens, E experts, k experts of a token.

Scoring = Literal["sigmoid", "sqrtsoftplus"]


def route_scores(
    logits_TE: torch.Tensor,
    *,
    scoring: Scoring,
    bias_E: torch.Tensor,
    top_k: int,
    normalise: bool,
    eps: float,
    scale: float,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token: ids int64 [T, k], best first, and weights fp32 [T, k].

    Scores are sigmoid(logits) or sqrt(softplus(logits)) of fp32 logits [T, E]. The k experts with
    the largest score + bias are chosen (bias fp32 [E], or [T, E] for a bias of each token); among
    equals the lower id. With `groups` > 1 only experts of the `top_groups` best of E / groups
    neighbours are open to choice, a group counting as the sum of its two largest biased scores
    (among equal groups the lower). Weights as in `weights_of`: the bias is not in them.
    Source: noaux_tc router of DeepSeek-V3, DeepSeek-V4 and GLM-5.
    """
    experts = logits_TE.shape[1]
    assert logits_TE.dtype == torch.float32 and bias_E.shape[-1] == experts
    assert top_k <= experts // groups * top_groups and 1 <= top_groups <= groups
    assert experts % groups == 0 and (groups == 1 or experts // groups >= 2)
    if backend.uses_triton(logits_TE):
        from kernels.router import launch

        values = launch.constants(
            experts, launch.SCORING[scoring], top_k, normalise, groups, top_groups
        )
        bias = bias_E.float().contiguous()
        return launch.route_scores(logits_TE.contiguous(), bias, values, eps, scale)
    ids_Tk = reference.choose(logits_TE, scoring, bias_E, top_k, groups, top_groups)
    weights_Tk = reference.weights_of(logits_TE, ids_Tk, scoring, normalise, eps, scale)
    return ids_Tk, weights_Tk


def weights_of(
    logits_TE: torch.Tensor,
    ids_Tk: torch.Tensor,
    *,
    scoring: Scoring,
    normalise: bool,
    eps: float,
    scale: float,
) -> torch.Tensor:
    """Weights fp32 [T, k] of experts that are already chosen, as int64 [T, k].

    The scores of `ids`, divided by their sum + eps where `normalise`, times `scale`.
    """
    assert logits_TE.dtype == torch.float32 and ids_Tk.shape[0] == logits_TE.shape[0]
    if backend.uses_triton(logits_TE):
        from kernels.router import launch

        return launch.weights_of(
            logits_TE.contiguous(), ids_Tk.contiguous(), scoring, normalise, eps, scale
        )
    return reference.weights_of(logits_TE, ids_Tk, scoring, normalise, eps, scale)
