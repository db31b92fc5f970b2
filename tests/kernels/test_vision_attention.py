"""Attention within an image, and the small layers of the towers, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.vision_attention import reference, vision_attention
from services.engine.layers.vision.parts import Grid, LayerNorm, gelu, gelu_tanh


def heads(patches: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(patches, 3, 24, generator=generator).to(dtype)


@pytest.mark.parametrize("scores", [1, 3 * 65 * 7, 1 << 24])
@pytest.mark.parametrize("patches", [1, 2, 63, 65])
def test_equals_torch_whatever_the_split(
    patches: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_SCORES", scores)
    q, k, v = (heads(patches, seed) for seed in (1, 2, 3))
    parts = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = functional.scaled_dot_product_attention(*parts)[0].transpose(0, 1)
    torch.testing.assert_close(vision_attention(q, k, v), expected, rtol=0, atol=1e-5)


def test_computes_in_fp32_and_returns_the_type_it_got() -> None:
    q, k, v = (heads(33, seed, torch.bfloat16) for seed in (1, 2, 3))
    found = vision_attention(q, k, v)
    wide = vision_attention(q.float(), k.float(), v.float())
    assert found.dtype == torch.bfloat16 and torch.equal(found, wide.bfloat16())


def test_norm_and_activations_equal_torch() -> None:
    x = torch.randn(37, 45, generator=torch.Generator().manual_seed(1)) * 3 + 1
    weight, bias = torch.randn(2, 45, generator=torch.Generator().manual_seed(2)).unbind()
    norm = LayerNorm(weight, bias, 1e-5)
    expected = functional.layer_norm(x, (45,), weight, bias, 1e-5)
    torch.testing.assert_close(norm(x, torch.float32), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(gelu(x), functional.gelu(x), rtol=0, atol=1e-6)
    tanh = functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(gelu_tanh(x), tanh, rtol=0, atol=1e-6)


def test_merged_order_keeps_blocks_together() -> None:
    order = Grid(rows=4, columns=6).merged_order(2, torch.device("cpu")).tolist()
    assert order[:8] == [0, 1, 6, 7, 2, 3, 8, 9] and sorted(order) == list(range(24))
