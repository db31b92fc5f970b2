"""The formulas in fp64 with torch's own functions: for tests and for the benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.mhc.launch import Mixer, Weights


def _values(x_TnD: torch.Tensor, mixer: Mixer) -> torch.Tensor:
    f_TX = x_TnD.flatten(1).double()
    size = (f_TX.square().mean(-1, keepdim=True) + mixer.norm_eps).sqrt()
    return torch.nn.functional.linear(f_TX / size, mixer.fn_MX.double())


def head_weights(x_TnD: torch.Tensor, mixer: Mixer) -> torch.Tensor:
    """[T, n]."""
    scaled = _values(x_TnD, mixer) * mixer.scale.double() + mixer.base_M.double()
    return scaled.sigmoid() + mixer.hc_eps


def mixing_weights(x_TnD: torch.Tensor, mixer: Mixer) -> Weights:
    """pre, post and comb."""
    n, eps = x_TnD.shape[1], mixer.hc_eps
    sizes = torch.tensor([n, n, n * n], device=x_TnD.device)
    factors = mixer.scale.double().repeat_interleave(sizes)
    logits = _values(x_TnD, mixer) * factors + mixer.base_M.double()
    pre, post, comb = logits.split([n, n, n * n], dim=1)
    c = comb.unflatten(1, (n, n)).softmax(-1) + eps
    c = c / (c.sum(1, keepdim=True) + eps)
    for _ in range(mixer.iterations - 1):
        c = c / (c.sum(2, keepdim=True) + eps)
        c = c / (c.sum(1, keepdim=True) + eps)
    return pre.sigmoid() + eps, post.sigmoid() * mixer.post_scale, c


def expanded(
    x_TnD: torch.Tensor, y_TD: torch.Tensor, post_Tn: torch.Tensor, comb_Tnn: torch.Tensor
) -> torch.Tensor:
    """[T, n, D]."""
    added = post_Tn.double()[..., None] * y_TD.double()[:, None]
    return added + comb_Tnn.double().transpose(1, 2) @ x_TnD.double()


def normed_collapse(
    x_TnD: torch.Tensor, pre_Tn: torch.Tensor, norm_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """[T, D]."""
    z = (pre_Tn.double()[..., None] * x_TnD.double()).sum(1)
    return z / (z.square().mean(-1, keepdim=True) + eps).sqrt() * norm_D.double()
