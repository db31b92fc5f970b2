"""Sums over streams run in a fixed order, so that a token's bits depend on the token alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.activation.reference import sigmoid
from kernels.quant_linear.matrix import PlainMatrix
from kernels.quant_linear.reference import linear


def mhc_mix(
    x_TnD: torch.Tensor,
    fn_MX: torch.Tensor,
    base_M: torch.Tensor,
    scale_3: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    post_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = x_TnD.shape[1]
    m_TM = _mixing_values(x_TnD, fn_MX, norm_eps)
    pre, post, comb = m_TM[:, :n], m_TM[:, n : 2 * n], m_TM[:, 2 * n :]
    pre_Tn = sigmoid(pre * scale_3[0] + base_M[:n]) + hc_eps
    post_Tn = sigmoid(post * scale_3[1] + base_M[n : 2 * n]) * post_scale
    comb_Tnn = (comb * scale_3[2] + base_M[2 * n :]).view(-1, n, n)
    return pre_Tn, post_Tn, _sinkhorn(comb_Tnn, hc_eps, iterations)


def mhc_head(
    x_TnD: torch.Tensor,
    fn_nX: torch.Tensor,
    base_n: torch.Tensor,
    scale_1: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    return sigmoid(_mixing_values(x_TnD, fn_nX, norm_eps) * scale_1 + base_n) + hc_eps


def _mixing_values(x_TnD: torch.Tensor, fn_MX: torch.Tensor, eps: float) -> torch.Tensor:
    f_TX = x_TnD.flatten(1).float()
    inverse_T1 = f_TX.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return linear(f_TX, PlainMatrix(fn_MX)) * inverse_T1


def _sinkhorn(logits_Tnn: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    c = (logits_Tnn - logits_Tnn.amax(-1, keepdim=True)).exp()
    c = c / _sum(c, -1) + eps
    c = c / (_sum(c, -2) + eps)
    for _ in range(iterations - 1):
        c = c / (_sum(c, -1) + eps)
        c = c / (_sum(c, -2) + eps)
    return c


def _sum(x_Tnn: torch.Tensor, dim: int) -> torch.Tensor:
    return _ordered_sum(x_Tnn.unbind(dim)).unsqueeze(dim)


def _ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def mhc_collapse(x_TnD: torch.Tensor, pre_Tn: torch.Tensor) -> torch.Tensor:
    return _ordered_sum((x_TnD.float() * pre_Tn[..., None]).unbind(1))


def mhc_expand(
    x_TnD: torch.Tensor, y_TD: torch.Tensor, post_Tn: torch.Tensor, comb_Tnn: torch.Tensor
) -> torch.Tensor:
    x = x_TnD.float()
    mixed = _ordered_sum([x[:, i, None] * comb_Tnn[:, i, :, None] for i in range(x_TnD.shape[1])])
    return mixed + post_Tn[..., None] * y_TD.float()[:, None]
