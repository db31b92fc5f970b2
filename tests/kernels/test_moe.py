"""The routed experts on a CPU."""

from __future__ import annotations

import torch

from kernels.moe import ExpertWeights, routed_experts
from kernels.quant_linear import PlainMatrix


def test_no_tokens_give_an_empty_result() -> None:
    experts = ExpertWeights(
        PlainMatrix(torch.randn(3, 32, 48)), PlainMatrix(torch.randn(3, 48, 16)), 3
    )
    ids = torch.zeros(0, 2, dtype=torch.int64)
    found = routed_experts(torch.zeros(0, 48), ids, torch.zeros(0, 2), experts)
    assert found.shape == (0, 48) and found.dtype == torch.float32
