"""Manifold-constrained hyper-connections: residual streams mixed by a doubly stochastic matrix."""

from __future__ import annotations

import torch

from kernels.mhc import reference

# Legend: T tokens, n streams, D hidden, M = (2 + n) n mixing values.


def mhc_mix(
    x_TnD: torch.Tensor,
    fn_MX: torch.Tensor,
    base_M: torch.Tensor,
    scale_3: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    post_scale: float = 2.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights of one sublayer: pre [T, n], post [T, n] and comb [T, n, n], all fp32.

    x [T, n, D] of any float type; fn fp32 [M, n * D], base fp32 [M], scale fp32 [3]. With
    f = x as one row of n * D values and m = (fn f) / sqrt(mean(f^2) + norm_eps):
    pre = sigmoid(m[:n] scale[0] + base[:n]) + hc_eps;
    post = post_scale * sigmoid(m[n:2n] scale[1] + base[n:2n]);
    comb = softmax over the last index of (m[2n:] scale[2] + base[2n:]) + hc_eps, its columns
    divided by (their sum + hc_eps), then `iterations` - 1 times rows and columns likewise
    (Sinkhorn). The first index of comb is the stream that is read, the second the one that is
    written. What `pre` is for is the caller's affair: the collapse before this sublayer, or the
    one before the next. Source: mHC as in DeepSeek-V4 inference code.
    """
    n, width = x_TnD.shape[1:]
    assert fn_MX.shape == ((2 + n) * n, n * width) and base_M.shape == fn_MX.shape[:1]
    assert scale_3.shape == (3,) and iterations >= 1
    assert fn_MX.dtype == base_M.dtype == scale_3.dtype == torch.float32
    return reference.mhc_mix(
        x_TnD, fn_MX, base_M, scale_3, norm_eps, hc_eps, iterations, post_scale
    )


def mhc_head(
    x_TnD: torch.Tensor,
    fn_nX: torch.Tensor,
    base_n: torch.Tensor,
    scale_1: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """Collapse weights before the output norm: fp32 [T, n], the `pre` formula of `mhc_mix` alone.

    fn fp32 [n, n * D], base fp32 [n], scale fp32 [1].
    """
    n, width = x_TnD.shape[1:]
    assert fn_nX.shape == (n, n * width) and base_n.shape == (n,) and scale_1.shape == (1,)
    return reference.mhc_head(x_TnD, fn_nX, base_n, scale_1, norm_eps, hc_eps)


def mhc_collapse(x_TnD: torch.Tensor, pre_Tn: torch.Tensor) -> torch.Tensor:
    """sum_i pre[i] x[i]: fp32 [T, D], streams added in order."""
    assert pre_Tn.shape == x_TnD.shape[:2]
    return reference.mhc_collapse(x_TnD, pre_Tn)


def mhc_expand(
    x_TnD: torch.Tensor, y_TD: torch.Tensor, post_Tn: torch.Tensor, comb_Tnn: torch.Tensor
) -> torch.Tensor:
    """out[j] = post[j] y + sum_i comb[i, j] x[i]: fp32 [T, n, D]."""
    assert y_TD.shape == (x_TnD.shape[0], x_TnD.shape[2]) and post_Tn.shape == x_TnD.shape[:2]
    assert comb_Tnn.shape == (*post_Tn.shape, post_Tn.shape[1])
    return reference.mhc_expand(x_TnD, y_TD, post_Tn, comb_Tnn)
