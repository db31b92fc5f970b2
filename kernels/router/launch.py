"""Launches of the routers' kernels: one for a call."""

from __future__ import annotations

import torch

from kernels.router.triton import SIGMOID, SOFTMAX, SQRT_SOFTPLUS, given_weights
from kernels.router.triton import route as route_kernel

# Legend: T tokens, E experts, k experts of a token.

SCORING = {"sigmoid": SIGMOID, "sqrtsoftplus": SQRT_SOFTPLUS}
WARPS = 1  # reductions stay within a warp


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def constants(
    experts: int, scoring: int, top_k: int, normalise: bool, groups: int = 1, top_groups: int = 1
) -> dict[str, int | bool]:
    """The constants of the `route` kernel."""
    return {
        "E": experts,
        "SCORING": scoring,
        "GROUPS": groups,
        "TOP_GROUPS": top_groups,
        "TOP_K": top_k,
        "NORMALISE": normalise,
        "BG": _power_of_two(groups),
        "BN": _power_of_two(experts // groups),
        "BK": _power_of_two(top_k),
    }


def route_scores(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor,
    values: dict[str, int | bool],
    eps: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 and weights fp32 [T, k]; bias fp32 [E] or [T, E]. `values` from `constants`."""
    tokens, experts = logits_TE.shape
    assert logits_TE.is_contiguous() and bias_E.is_contiguous()
    assert bias_E.shape in ((experts,), (tokens, experts))
    shape = (tokens, int(values["TOP_K"]))
    ids_Tk = torch.empty(shape, dtype=torch.int64, device=logits_TE.device)
    weights_Tk = torch.empty(shape, dtype=torch.float32, device=logits_TE.device)
    if tokens:
        route_kernel[(tokens,)](
            logits_TE, bias_E, ids_Tk, weights_Tk, experts if bias_E.dim() == 2 else 0, eps, scale,
            **values, num_warps=WARPS,
        )  # fmt: skip
    return ids_Tk, weights_Tk


def route_softmax(
    logits_TE: torch.Tensor, top_k: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 and weights fp32 [T, k] by softmax over all experts."""
    logits_TE = logits_TE.contiguous()
    values = constants(logits_TE.shape[1], SOFTMAX, top_k, normalise)
    return route_scores(logits_TE, logits_TE, values, 0.0, 1.0)


def weights_of(
    logits_TE: torch.Tensor,
    ids_Tk: torch.Tensor,
    scoring: str,
    normalise: bool,
    eps: float,
    scale: float,
) -> torch.Tensor:
    """Weights fp32 [T, k] of the experts `ids` int64 [T, k]; 0 for an id outside 0 to E - 1."""
    assert logits_TE.is_contiguous() and ids_Tk.is_contiguous() and ids_Tk.dtype == torch.int64
    tokens, top_k = ids_Tk.shape
    weights_Tk = torch.empty(ids_Tk.shape, dtype=torch.float32, device=ids_Tk.device)
    if tokens:
        given_weights[(tokens,)](
            logits_TE, ids_Tk, weights_Tk, eps, scale, logits_TE.shape[1], SCORING=SCORING[scoring],
            TOP_K=top_k, NORMALISE=normalise, BK=_power_of_two(top_k), num_warps=WARPS,
        )  # fmt: skip
    return weights_Tk
