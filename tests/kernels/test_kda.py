"""The recurrence against both forms of `transformers`; states after any token."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import (
    Glm5NextTextForgetGate,
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)

from kernels.kda import kda, log_decay
from tests.kernels.test_row_independence import assert_rows_independent

HEADS, K, V = 3, 16, 24


class Inputs:
    def __init__(self, tokens: int) -> None:
        self.q = torch.randn(tokens, HEADS, K)
        self.k = torch.randn(tokens, HEADS, K)
        self.v = torch.randn(tokens, HEADS, V)
        self.decay = -5 * torch.rand(tokens, HEADS, K)
        self.beta = torch.rand(tokens, HEADS)

    def at(self, rows: slice) -> tuple[torch.Tensor, ...]:
        return tuple(t[rows] for t in (self.q, self.k, self.v, self.decay, self.beta))

    def run(self, state, starts: list[int], writes: list[int], rows=slice(None)):
        return kda(*self.at(rows), state, torch.tensor(starts), torch.tensor(writes))


@pytest.mark.parametrize("rule", [recurrent_kimi_delta_attention, chunk_kimi_delta_attention])
@pytest.mark.parametrize("tokens", [1, 7, 64, 130])
def test_outputs_and_states_equal_transformers(rule, tokens: int) -> None:
    inputs, state = Inputs(tokens), torch.randn(1, HEADS, K, V)
    out, states = inputs.run(state, [0, tokens], [tokens - 1])
    q, k, v, decay, beta = (t[None] for t in inputs.at(slice(None)))
    expected, last = rule(
        q,
        k,
        v,
        g=decay,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out, expected[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(states[0], last[0], rtol=0, atol=2e-5)


def test_a_channel_forgets_at_its_own_rate() -> None:
    """With beta 0 nothing is written: after one token row c of S is exp(decay_c) of itself."""
    inputs, state = Inputs(1), torch.randn(1, HEADS, K, V)
    inputs.beta.zero_()
    _, states = inputs.run(state, [0, 1], [0])
    assert torch.equal(states[0], inputs.decay[0].exp()[..., None] * state[0])


def test_packed_sequences_equal_each_alone() -> None:
    lengths = [5, 1, 9, 1, 3]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    inputs, state = Inputs(starts[-1]), torch.randn(5, HEADS, K, V)
    out, states = inputs.run(state, starts, [s - 1 for s in starts[1:]])
    for b, length in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        alone, last = inputs.run(state[b : b + 1], [0, length], [length - 1], rows)
        assert torch.equal(out[rows], alone)
        assert torch.equal(states[b], last[0])


def test_states_after_any_token_continue_the_sequence() -> None:
    inputs, state = Inputs(20), torch.randn(1, HEADS, K, V)
    before = state.clone()
    out, states = inputs.run(state, [0, 20], [0, 6, 6, 19])
    assert torch.equal(states[1], states[2]) and torch.equal(state, before)
    rest, last = inputs.run(states[1:2], [0, 13], [12], slice(7, 20))
    assert torch.equal(rest, out[7:])
    assert torch.equal(last[0], states[3])


@pytest.mark.parametrize("bound", [-5.0, -1.0, None])
def test_decay_equals_transformers(bound: float | None) -> None:
    config = Glm5NextTextConfig(
        hidden_size=32, linear_num_heads=HEADS, linear_head_dim=K, linear_lower_bound=bound
    )
    gate = Glm5NextTextForgetGate(config)
    for parameter in gate.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(1, 40, 32)
    forget = gate.f_b_proj(gate.f_a_proj(x)).view(40, HEADS, K)
    found = log_decay(forget, gate.A_log, gate.dt_bias.view(HEADS, K), lower_bound=bound)
    torch.testing.assert_close(found, gate(x)[0], rtol=1e-5, atol=1e-5)
    assert (found <= 0).all() and (bound is None or (found >= bound).all())


@pytest.mark.parametrize("bound", [-5.0, None])
def test_decay_rows_are_independent(bound: float | None) -> None:
    a_log, dt_bias = torch.randn(HEADS), torch.randn(HEADS, 20)
    assert_rows_independent(
        lambda x: log_decay(x, a_log, dt_bias, lower_bound=bound), torch.randn(37, HEADS, 20)
    )
