from __future__ import annotations

import torch

from kernels.activation.reference import sigmoid, softplus


def choose(
    logits_TE: torch.Tensor,
    scoring: str,
    bias_E: torch.Tensor,
    top_k: int,
    groups: int,
    top_groups: int,
) -> torch.Tensor:
    biased_TE = _scores(logits_TE, scoring) + bias_E.float()
    if groups > 1:
        biased_TE = _only_best_groups(biased_TE, groups, top_groups)
    return _best(biased_TE, top_k)


def weights_of(
    logits_TE: torch.Tensor,
    ids_Tk: torch.Tensor,
    scoring: str,
    normalise: bool,
    eps: float,
    scale: float,
) -> torch.Tensor:
    weights_Tk = _scores(logits_TE, scoring).gather(1, ids_Tk)
    if normalise:
        total_T = weights_Tk[:, 0]
        for j in range(1, weights_Tk.shape[1]):
            total_T = total_T + weights_Tk[:, j]
        weights_Tk = weights_Tk / (total_T + eps)[:, None]
    return weights_Tk * scale


def _scores(logits_TE: torch.Tensor, scoring: str) -> torch.Tensor:
    match scoring:
        case "sigmoid":
            return sigmoid(logits_TE)
        case "sqrtsoftplus":
            return softplus(logits_TE).sqrt_()
        case _:
            raise ValueError(f"scoring {scoring!r} is neither sigmoid nor sqrtsoftplus")


def _only_best_groups(biased_TE: torch.Tensor, groups: int, top_groups: int) -> torch.Tensor:
    """-inf for all experts outside the best groups."""
    members_TGN = biased_TE.unflatten(1, (groups, -1))
    two_TG2 = torch.sort(members_TGN, dim=-1, descending=True).values[..., :2]
    best_Tg = _best(two_TG2[..., 0] + two_TG2[..., 1], top_groups)
    closed_TG = torch.ones_like(two_TG2[..., 0], dtype=torch.bool).scatter_(1, best_Tg, False)
    open_TGN: torch.Tensor = members_TGN.masked_fill(closed_TG[..., None], -torch.inf)
    return open_TGN.flatten(1)


def _best(values_TN: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest, best first; among equals the lower index."""
    return torch.sort(values_TN, dim=-1, descending=True, stable=True).indices[:, :count]
