"""Angles of both kinds of layer, up to the last position of the released models."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.rotary import rotary_angles, rotate_tail_pairs
from services.engine.models.deepseek_v4_config import parse_config
from tests.models.deepseek_v4.test_loading import RELEASED

LAST = 1_048_575


def test_frequencies_of_compressed_layers_are_the_released_ones() -> None:
    rope = parse_config(RELEASED).ropes.compressed
    assert rope.scaling == 1.0
    checks = {0: 1.0, 15: 3.635538509e-3, 20: 2.969777852e-4, 31: 5.680529398e-7}
    for index, value in checks.items():
        assert float(rope.inverse_F[index]) == pytest.approx(value, rel=1e-6)


def test_frequencies_of_window_layers_are_plain() -> None:
    rope = parse_config(RELEASED).ropes.window
    wanted = [10000.0 ** (-2 * i / 64) for i in range(32)]
    assert rope.scaling == 1.0
    torch.testing.assert_close(rope.inverse_F, torch.tensor(wanted), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["window", "compressed"])
def test_angles_are_exact_up_to_the_last_position(kind: str) -> None:
    """cos and sin of the fp32 product position * frequency, reduced without loss."""
    rope = getattr(parse_config(RELEASED).ropes, kind)
    positions = torch.tensor([0, 1, 65_535, 131_071, 131_072, LAST - 127, LAST])
    cos, sin = rotary_angles(positions, rope.inverse_F, rope.scaling)
    angles = (positions.float()[:, None] * rope.inverse_F).double()
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=2e-7)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=2e-7)


def test_only_the_tail_turns_in_neighbouring_pairs() -> None:
    x = torch.randn(3, 2, 10)
    cos, sin = rotary_angles(torch.tensor([0, 7, LAST]), torch.tensor([1.0, 0.01]))
    turned = rotate_tail_pairs(x, cos, sin)
    assert torch.equal(turned[..., :6], x[..., :6])
    for t, position in enumerate((0.0, 7.0, float(LAST))):
        for pair, frequency in enumerate((1.0, 0.01)):
            angle = float(torch.tensor(position) * torch.tensor(frequency))
            unit = complex(math.cos(angle), math.sin(angle))
            for head in range(2):
                a, b = x[t, head, 6 + 2 * pair : 8 + 2 * pair].tolist()
                wanted = complex(a, b) * unit
                found = turned[t, head, 6 + 2 * pair : 8 + 2 * pair].tolist()
                assert found == pytest.approx([wanted.real, wanted.imag], abs=1e-5)
    back = rotate_tail_pairs(turned, cos, sin, inverse=True)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-6)
