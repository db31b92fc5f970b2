"""Engram rows and gate against the release's own numbers, and row by row independence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from kernels.engram import decode_rows, engram_gate

GOLDENS = Path(__file__).parents[1] / "goldens/deepseek_v41"
EPS = 1e-20


def e4m3(code: int) -> float:
    """By the definition of OCP e4m3."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -value if sign else value


def test_rows_decode_to_code_times_the_scale_of_their_group() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 0x7F, (3, 2, 64), generator=generator)
    codes |= torch.randint(0, 2, codes.shape, generator=generator) << 7
    scales = torch.randint(100, 150, (3, 2, 2), generator=generator)
    rows = torch.cat([codes, scales], dim=2).to(torch.uint8).flatten(1)
    expected = [
        [
            e4m3(int(codes[t, h, i])) * 2.0 ** (int(scales[t, h, i // 32]) - 127)
            for h in range(2)
            for i in range(64)
        ]
        for t in range(3)
    ]
    assert torch.equal(decode_rows(rows, 2), torch.tensor(expected))


def scalar_gate(x: list[float], q: list[float], k: list[float], key: list[float]) -> float:
    """One gate by plain Python floats."""
    width = len(x)
    dot = sum(a * b * c * d for a, b, c, d in zip(x, q, k, key, strict=True))
    for values in (x, key):
        dot /= (sum(v * v for v in values) / width + EPS) ** 0.5
    dot /= width**0.5
    root = np.copysign(max(abs(dot), 1e-6) ** 0.5, dot)
    return float(1 / (1 + np.exp(-root)))


@pytest.fixture
def drawn() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((5, 4, 48), (5, 4, 48), (5, 48), (4, 48), (4, 48))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_gate_equals_scalar_arithmetic(drawn: list[torch.Tensor]) -> None:
    x, key, value, q, k = drawn
    out = engram_gate(x, key, value, q, k, None, eps=EPS)
    for t in range(5):
        for n in range(4):
            gate = scalar_gate(*(v.double().tolist() for v in (x[t, n], q[n], k[n], key[t, n])))
            torch.testing.assert_close(out[t, n], x[t, n] + gate * value[t], rtol=0, atol=1e-5)


def test_a_dot_of_zero_opens_by_the_least_amount(drawn: list[torch.Tensor]) -> None:
    x, key, value, q, k = drawn
    out = engram_gate(x, torch.zeros_like(key), value, q, k, None, eps=EPS)
    expected = x + torch.sigmoid(torch.tensor(1e-3)) * value[:, None]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_closed_tokens_keep_their_streams(drawn: list[torch.Tensor]) -> None:
    x, key, value, q, k = drawn
    closed = torch.tensor([False, True, False, False, True])
    out = engram_gate(x, key, value, q, k, closed, eps=EPS)
    assert torch.equal(out[closed], x[closed])
    assert torch.equal(out[~closed], engram_gate(x, key, value, q, k, None, eps=EPS)[~closed])


def test_a_token_does_not_depend_on_those_beside_it(drawn: list[torch.Tensor]) -> None:
    x, key, value, q, k = drawn
    together = engram_gate(x, key, value, q, k, None, eps=EPS)
    for t in range(5):
        row = slice(t, t + 1)
        alone = engram_gate(x[row], key[row], value[row], q, k, None, eps=EPS)
        assert torch.equal(alone, together[row])


def test_rows_of_the_release_move_its_streams() -> None:
    """Hash ids, rows, projection and gate of layer 1 of the golden model, weights decoded here."""
    with np.load(GOLDENS / "activations_exact.npz") as points:
        ids = torch.from_numpy(points["L1.engram_hash_ids"])
        before, after = (
            torch.from_numpy(points[f"L1.stream_{which}_engram"]) for which in ("before", "after")
        )
    with safe_open(str(GOLDENS / "model.safetensors"), "pt") as file:
        name = "layers.1.engram."
        table = file.get_tensor(f"{name}embed.weight").view(torch.uint8)
        scales = file.get_tensor(f"{name}embed.scale").view(torch.uint8)
        wkv = file.get_tensor(f"{name}wkv.weight").float()
        factors = torch.exp2(file.get_tensor(f"{name}wkv.scale").view(torch.uint8).float() - 127)
        q, k = (file.get_tensor(f"{name}{which}_weight") for which in "qk")
    rows = torch.cat([table, scales], dim=1)[ids].flatten(1)
    weight = wkv * factors.repeat_interleave(32, 0).repeat_interleave(32, 1)
    kv = decode_rows(rows, ids.shape[1]) @ weight.t()
    keys, value = kv[:, :512].unflatten(1, (4, 128)), kv[:, 512:]
    found = engram_gate(before, keys, value, q, k, None, eps=EPS)
    torch.testing.assert_close(found, after, rtol=0, atol=1e-5)
    assert (after - before).abs().amax() > 1
