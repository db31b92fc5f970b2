from __future__ import annotations

import torch

# Scores that are held at a time: bounds the memory of a large image.
_SCORES = 1 << 24


def vision_attention(q_PHD: torch.Tensor, k_PHD: torch.Tensor, v_PHD: torch.Tensor) -> torch.Tensor:
    patches, heads, width = q_PHD.shape
    q_HPD = q_PHD.float().transpose(0, 1) * width**-0.5
    k_HDP, v_HPD = k_PHD.float().permute(1, 2, 0), v_PHD.float().transpose(0, 1)
    rows = max(1, _SCORES // (heads * patches))
    blocks = [
        torch.bmm(torch.softmax(torch.bmm(q_HRD, k_HDP), dim=-1), v_HPD)
        for q_HRD in q_HPD.split(rows, dim=1)
    ]
    return torch.cat(blocks, dim=1).transpose(0, 1)
