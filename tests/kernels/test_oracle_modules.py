"""Operations against the `transformers` modules that define them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import conv1d, pad, silu
from transformers.models.qwen4_exp import modeling_qwen4_exp as tf

from kernels.activation import sigmoid, silu_and_mul, softplus
from kernels.causal_conv import causal_conv, history, history_rows
from kernels.embedding import embedding
from kernels.hyper_connection import hyper_read, hyper_write
from kernels.moe import ExpertWeights, route, routed_experts
from kernels.ple import ple_gate
from kernels.quant_linear import PlainMatrix
from kernels.rms_norm import rms_norm, rms_norm_gated
from kernels.rotary import apply_rotary, rotary_angles

CLOSE = {"rtol": 0, "atol": 2e-6}


def randomise(module: torch.nn.Module) -> torch.nn.Module:
    for p in module.parameters():
        p.data = torch.randn_like(p) / max(1, p.shape[-1]) ** 0.5
    return module.eval()


@pytest.mark.parametrize("group", [None, 32])
def test_rms_norm(group: int | None) -> None:
    module = randomise(tf.Qwen4ExpTextRMSNorm(128, group_size=group))
    x = torch.randn(5, 128)
    found = rms_norm(x, module.weight, eps=1e-6, group_size=group)
    torch.testing.assert_close(found, module(x), **CLOSE)


@pytest.mark.parametrize("gate_type", ["silu", "sigmoid"])
def test_gated_rms_norm(gate_type: str) -> None:
    module = randomise(tf.Qwen4ExpTextRMSNormGated(32, activation=gate_type))
    x, gate = torch.randn(7, 6, 32), torch.randn(7, 6, 32)
    found = rms_norm_gated(x, gate, module.weight, eps=1e-6, gate_type=gate_type)
    torch.testing.assert_close(found, module(x, gate), **CLOSE)


def test_activations_equal_torch() -> None:
    x = torch.cat([torch.randn(100) * 5, torch.tensor([-200.0, -50.0, 0.0, 50.0, 200.0])])
    torch.testing.assert_close(sigmoid(x), torch.sigmoid(x), **CLOSE)
    torch.testing.assert_close(softplus(x), torch.nn.functional.softplus(x), **CLOSE)
    torch.testing.assert_close(silu_and_mul(x, x), silu(x) * x, rtol=1e-6, atol=2e-6)


def test_rotary() -> None:
    positions = torch.tensor([0, 5, 100_000, 262_143])
    frequencies = 1.0 / 1e7 ** (torch.arange(0, 16, 2).float() / 16)
    x = torch.randn(4, 3, 64)
    angles = positions[:, None].float() * frequencies
    full = torch.cat([angles, angles], dim=-1)[None]
    expected = tf.apply_rotary_pos_emb(x[None], cos=full.cos(), sin=full.sin(), unsqueeze_dim=2)[0]
    found = apply_rotary(x, *rotary_angles(positions, frequencies))
    torch.testing.assert_close(found, expected, **CLOSE)
    assert torch.equal(found[..., 16:], x[..., 16:])


def test_hyper_connection() -> None:
    config = SimpleNamespace(hc_count=4, hidden_size=32, hc_lowrank=8, rms_norm_eps=1e-6)
    module = randomise(tf.Qwen4ExpTextGatedResidual(config))
    streams, y = torch.randn(6, 128), torch.randn(6, 32)
    expected, _, weights = module(streams)
    found, inject = hyper_read(
        streams,
        module.hc_norm.weight,
        PlainMatrix(module.input_mix_weight_down.weight),
        PlainMatrix(module.input_mix_weight_up.weight),
        PlainMatrix(module.block_inject_weight.weight),
        count=4,
        eps=1e-6,
    )
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(inject, weights, **CLOSE)
    combined = streams + (y[:, None] * weights[..., None]).flatten(1)
    torch.testing.assert_close(hyper_write(streams, y, inject), combined, **CLOSE)


@pytest.mark.parametrize("normalise", [True, False])
def test_mixture_of_experts(normalise: bool) -> None:
    config = SimpleNamespace(
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=normalise,
        hidden_size=32,
        moe_intermediate_size=24,
        hidden_act="silu",
        _experts_implementation="eager",
    )
    router = randomise(tf.Qwen4ExpTextTopKRouter(config))
    experts = randomise(tf.Qwen4ExpTextExperts(config))
    x = torch.randn(11, 32)
    logits, scores, chosen = router(x)
    ids, weights = route(logits, 3, normalise=normalise)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(weights, scores, **CLOSE)
    gate_up, down = experts.gate_up_proj, experts.down_proj
    expected = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(scores[t], chosen[t], strict=True):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            expected[t] += weight * (down[e] @ (silu(gate) * up))
    whole = ExpertWeights(PlainMatrix(gate_up), PlainMatrix(down), count=6)
    torch.testing.assert_close(routed_experts(x, ids, weights, whole), expected, **CLOSE)
    halves = [
        ExpertWeights(PlainMatrix(gate_up[a : a + 3]), PlainMatrix(down[a : a + 3]), 3, a)
        for a in (0, 3)
    ]
    split = sum(routed_experts(x, ids, weights, half) for half in halves)
    torch.testing.assert_close(split, expected, **CLOSE)


def test_equal_experts_are_taken_in_the_order_of_their_ids() -> None:
    ids, weights = route(torch.zeros(2, 7), 3, normalise=True)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3), **CLOSE)


@pytest.mark.parametrize(("taps", "dilation"), [(4, 1), (4, 3), (2, 5)])
def test_causal_convolution_over_packed_chunks(taps: int, dilation: int) -> None:
    window = (taps - 1) * dilation
    weight = torch.randn(8, taps)
    texts = [torch.randn(n, 8) for n in (13, 4, 30)]
    done = [5, 0, 17]
    expected = []
    for x, start in zip(texts, done, strict=True):
        padded = pad(x.t()[None], (window, 0))
        y = conv1d(padded, weight[:, None], groups=8, dilation=dilation)[0].t()
        expected.append(silu(y)[start:])
    windows = torch.stack(
        [pad(x[:start], (0, 0, window, 0))[-window:] for x, start in zip(texts, done, strict=True)]
    )
    rest = [x[start:] for x, start in zip(texts, done, strict=True)]
    sequence = torch.cat([torch.full((len(r),), b) for b, r in enumerate(rest)])
    offset = torch.cat([torch.arange(len(r)) for r in rest])
    rows = history_rows(
        torch.arange(len(sequence)),
        sequence,
        offset,
        sequences=3,
        window=window,
        delays=tuple(range(window, -1, -dilation)),
    )
    found = causal_conv(history(torch.cat(rest), windows), rows, weight)
    torch.testing.assert_close(found, torch.cat(expected), **CLOSE)


def test_ple_gate() -> None:
    key, query, value = torch.randn(9, 128), torch.randn(9, 128), torch.randn(9, 32)
    key[0] = 0  # a product of exactly zero opens the gate halfway
    product = (key.view(9, 4, 32) * query.view(9, 4, 32)).sum(-1, keepdim=True) / 32**0.5
    root = product.abs().clamp_min(1e-6).sqrt() * product.sign()
    expected = (torch.sigmoid(root) * value[:, None]).flatten(1)
    found = ple_gate(key, query, value, 4)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert torch.equal(found[0], (value[0] / 2).repeat(4))


def test_embedding_slices_add_up() -> None:
    table = torch.randn(10, 4)
    ids = torch.tensor([0, 9, 4, 5])
    halves = [embedding(ids, table[a : a + 5], a) for a in (0, 5)]
    assert torch.equal(halves[0] + halves[1], table[ids])
