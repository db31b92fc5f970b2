"""Hyper-connection mixing against `transformers`, and row by row."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)

from kernels.mhc import mhc_collapse, mhc_expand, mhc_head, mhc_mix
from tests.kernels.test_row_independence import assert_rows_independent

STREAMS, HIDDEN = 4, 96
OPTIONS = {"norm_eps": 1e-6, "hc_eps": 1e-6}


def weights(values: int, scales: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fn = torch.randn(values, STREAMS * HIDDEN) / 20
    return fn, torch.randn(values), torch.rand(scales) + 0.5


@pytest.mark.parametrize("iterations", [1, 20])
@pytest.mark.parametrize("tokens", [1, 13])
def test_mixing_equals_transformers(iterations: int, tokens: int) -> None:
    config = DeepseekV4Config(hidden_size=HIDDEN, hc_mult=STREAMS, hc_sinkhorn_iters=iterations)
    oracle = DeepseekV4HyperConnection(config)
    fn, base, scale = weights((2 + STREAMS) * STREAMS, 3)
    for parameter, value in ((oracle.fn, fn), (oracle.base, base), (oracle.scale, scale)):
        parameter.copy_(value)
    x = torch.randn(tokens, STREAMS, HIDDEN) * 3
    post, comb, collapsed = (t[0] for t in oracle(x[None]))
    found = mhc_mix(x, fn, base, scale, iterations=iterations, **OPTIONS)
    torch.testing.assert_close(found[1], post, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[2], comb, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mhc_collapse(x, found[0]), collapsed, rtol=1e-5, atol=1e-5)


def test_head_equals_transformers() -> None:
    oracle = DeepseekV4HyperHead(DeepseekV4Config(hidden_size=HIDDEN, hc_mult=STREAMS))
    fn, base, scale = weights(STREAMS, 1)
    oracle.hc_fn.copy_(fn)
    oracle.hc_base.copy_(base)
    oracle.hc_scale.copy_(scale)
    x = torch.randn(7, STREAMS, HIDDEN)
    pre = mhc_head(x, fn, base, scale, **OPTIONS)
    torch.testing.assert_close(mhc_collapse(x, pre), oracle(x[None])[0], rtol=1e-5, atol=1e-5)


def test_the_first_index_of_comb_is_the_stream_that_is_read() -> None:
    x = torch.zeros(1, STREAMS, HIDDEN)
    x[0, 1] = 1.0
    comb = torch.zeros(1, STREAMS, STREAMS)
    comb[0, 1, 3] = 2.0
    out = mhc_expand(x, torch.ones(1, HIDDEN), torch.tensor([[0.0, 0.0, 5.0, 0.0]]), comb)
    assert out[0].mean(1).tolist() == [0.0, 0.0, 5.0, 2.0]


def test_many_iterations_give_a_doubly_stochastic_matrix() -> None:
    fn, base, scale = weights((2 + STREAMS) * STREAMS, 3)
    x = torch.randn(50, STREAMS, HIDDEN)
    comb = mhc_mix(x, fn, base, scale, iterations=100, **OPTIONS)[2]
    assert (comb >= 0).all()
    torch.testing.assert_close(comb.sum(1), torch.ones(50, STREAMS), rtol=0, atol=1e-4)
    torch.testing.assert_close(comb.sum(2), torch.ones(50, STREAMS), rtol=0, atol=1e-3)


def test_equal_streams_and_large_logits_stay_finite() -> None:
    fn, base, scale = weights((2 + STREAMS) * STREAMS, 3)
    x = torch.full((3, STREAMS, HIDDEN), 1e4)
    for value in mhc_mix(x, fn * 1e3, base * 100, scale, iterations=20, **OPTIONS):
        assert value.isfinite().all()


def test_a_tokens_bits_are_its_own() -> None:
    fn, base, scale = weights((2 + STREAMS) * STREAMS, 3)

    def whole(x_TX: torch.Tensor) -> torch.Tensor:
        x = x_TX.unflatten(1, (STREAMS, HIDDEN))
        pre, post, comb = mhc_mix(x, fn, base, scale, iterations=20, **OPTIONS)
        return mhc_expand(x, mhc_collapse(x, pre), post, comb).flatten(1)

    assert_rows_independent(whole, torch.randn(31, STREAMS * HIDDEN))
