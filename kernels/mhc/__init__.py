"""Manifold-constrained hyper-connections: residual streams mixed by a doubly stochastic matrix."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.mhc import reference
from kernels.rms_norm import rms_norm

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
    if not backend.uses_triton(x_TnD):
        return reference.mhc_mix(
            x_TnD, fn_MX, base_M, scale_3, norm_eps, hc_eps, iterations, post_scale
        )
    from kernels.mhc import launch

    mixer = launch.Mixer(fn_MX, base_M, scale_3, norm_eps, hc_eps, iterations, post_scale)
    return launch.mix(x_TnD, mixer)[1]


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
    if not backend.uses_triton(x_TnD):
        return reference.mhc_head(x_TnD, fn_nX, base_n, scale_1, norm_eps, hc_eps)
    from kernels.mhc import launch

    return launch.mix(x_TnD, launch.Mixer(fn_nX, base_n, scale_1, norm_eps, hc_eps))[1][0]


def mhc_collapse(x_TnD: torch.Tensor, pre_Tn: torch.Tensor) -> torch.Tensor:
    """sum_i pre[i] x[i]: fp32 [T, D], streams added in order."""
    assert pre_Tn.shape == x_TnD.shape[:2]
    if not backend.uses_triton(x_TnD):
        return reference.mhc_collapse(x_TnD, pre_Tn)
    from kernels.mhc import launch

    return launch.collapse(x_TnD, pre_Tn, torch.float32)


def mhc_expand(
    x_TnD: torch.Tensor, y_TD: torch.Tensor, post_Tn: torch.Tensor, comb_Tnn: torch.Tensor
) -> torch.Tensor:
    """out[j] = post[j] y + sum_i comb[i, j] x[i]: fp32 [T, n, D]."""
    assert y_TD.shape == (x_TnD.shape[0], x_TnD.shape[2]) and post_Tn.shape == x_TnD.shape[:2]
    assert comb_Tnn.shape == (*post_Tn.shape, post_Tn.shape[1])
    if not backend.uses_triton(x_TnD):
        return reference.mhc_expand(x_TnD, y_TD, post_Tn, comb_Tnn)
    from kernels.mhc import launch

    return launch.expand(x_TnD, y_TD, post_Tn, comb_Tnn, torch.float32)


def mhc_pre(
    x_TnD: torch.Tensor,
    fn_MX: torch.Tensor,
    base_M: torch.Tensor,
    scale_3: torch.Tensor,
    norm_D: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    post_scale: float = 2.0,
    pre_Tn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input of a block and the weights of its sublayer: y [T, D], pre, post and comb.

    y, in the type of x, is the collapse rounded to it, then its RMS norm with the plain weight
    norm [D] and `norm_eps`. The collapse is weighted with `pre_Tn` fp32 [T, n] where given
    (DeepSeek-V4.1: that of the sublayer before), else with the `pre` made here. For the others
    see `mhc_mix`.
    """
    if not backend.uses_triton(x_TnD):
        pre, post, comb = mhc_mix(
            x_TnD, fn_MX, base_M, scale_3, norm_eps=norm_eps, hc_eps=hc_eps,
            iterations=iterations, post_scale=post_scale,
        )  # fmt: skip
        y_TD = reference.mhc_collapse(x_TnD, pre if pre_Tn is None else pre_Tn).to(x_TnD.dtype)
        y_TD = rms_norm(y_TD, norm_D, eps=norm_eps, zero_centred=False)
        return y_TD, pre, post, comb
    from kernels.mhc import launch

    mixer = launch.Mixer(fn_MX, base_M, scale_3, norm_eps, hc_eps, iterations, post_scale)
    _, y_TD, weights = launch.pre(x_TnD, mixer, norm_D, pre_Tn)
    return y_TD, *weights


def mhc_post(
    x_TnD: torch.Tensor, y_TD: torch.Tensor, post_Tn: torch.Tensor, comb_Tnn: torch.Tensor
) -> torch.Tensor:
    """`mhc_expand` in the type of x."""
    assert y_TD.shape == (x_TnD.shape[0], x_TnD.shape[2]) and post_Tn.shape == x_TnD.shape[:2]
    if not backend.uses_triton(x_TnD):
        return reference.mhc_expand(x_TnD, y_TD, post_Tn, comb_Tnn).to(x_TnD.dtype)
    from kernels.mhc import launch

    return launch.expand(x_TnD, y_TD, post_Tn, comb_Tnn, x_TnD.dtype)


def mhc_post_pre(
    x_TnD: torch.Tensor,
    y_TD: torch.Tensor,
    post_Tn: torch.Tensor,
    comb_Tnn: torch.Tensor,
    fn_MX: torch.Tensor,
    base_M: torch.Tensor,
    scale_3: torch.Tensor,
    norm_D: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    post_scale: float = 2.0,
    pre_Tn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The end of one sublayer and the start of the next: x' = `mhc_post`, then `mhc_pre` of x'.

    Returns x' [T, n, D] and the four values of `mhc_pre`.
    """
    if not backend.uses_triton(x_TnD):
        x_TnD = mhc_post(x_TnD, y_TD, post_Tn, comb_Tnn)
        made = mhc_pre(
            x_TnD, fn_MX, base_M, scale_3, norm_D, norm_eps=norm_eps, hc_eps=hc_eps,
            iterations=iterations, post_scale=post_scale, pre_Tn=pre_Tn,
        )  # fmt: skip
        return x_TnD, *made
    from kernels.mhc import launch

    mixer = launch.Mixer(fn_MX, base_M, scale_3, norm_eps, hc_eps, iterations, post_scale)
    # `pre` of the sublayer that ends is not read.
    expanded = (y_TD, (post_Tn, post_Tn, comb_Tnn))
    x_TnD, out_TD, weights = launch.pre(x_TnD, mixer, norm_D, pre_Tn, expanded)
    return x_TnD, out_TD, *weights
