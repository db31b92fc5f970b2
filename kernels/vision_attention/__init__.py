"""Attention within one image: every patch sees every patch."""

from __future__ import annotations

import torch

from kernels.vision_attention import reference


def vision_attention(q_PHD: torch.Tensor, k_PHD: torch.Tensor, v_PHD: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v over all patches of one image, per head.

    q, k and v [P, H, D] of one float type. Products and softmax in fp32; returns [P, H, D] in the
    type of q. One call holds one image, so that what else is computed cannot enter.
    """
    assert q_PHD.dim() == 3 and q_PHD.shape == k_PHD.shape == v_PHD.shape
    return reference.vision_attention(q_PHD, k_PHD, v_PHD).to(q_PHD.dtype)
