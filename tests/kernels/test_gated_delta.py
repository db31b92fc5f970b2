"""The recurrence against the oracle's recurrent and chunked forms; states after any token."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from kernels.gated_delta import gated_delta

KEY_HEADS, HEADS, K, V = 2, 6, 16, 24


class Inputs:
    def __init__(self, tokens: int) -> None:
        self.q = torch.randn(tokens, KEY_HEADS, K)
        self.k = torch.randn(tokens, KEY_HEADS, K)
        self.v = torch.randn(tokens, HEADS, V)
        self.decay = -torch.rand(tokens, HEADS)
        self.beta = torch.rand(tokens, HEADS)

    def at(self, rows: slice | torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t[rows] for t in (self.q, self.k, self.v, self.decay, self.beta))

    def run(self, state, starts: list[int], writes: list[int], rows=slice(None)):
        return gated_delta(*self.at(rows), state, torch.tensor(starts), torch.tensor(writes))


def oracle(rule, inputs: Inputs, state: torch.Tensor, rows: slice):
    q, k, v, g, beta = (t[None] for t in inputs.at(rows))
    out, last = rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], last[0]


@pytest.mark.parametrize("rule", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
@pytest.mark.parametrize("tokens", [1, 7, 64, 130])
def test_outputs_and_states_equal_the_oracle(rule, tokens: int) -> None:
    inputs, state = Inputs(tokens), torch.randn(1, HEADS, K, V)
    out, states = inputs.run(state, [0, tokens], [tokens - 1])
    expected, last = oracle(rule, inputs, state[0], slice(0, tokens))
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(states[0], last, rtol=0, atol=2e-5)


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
    out, states = inputs.run(state, [0, 20], [0, 6, 6, 19])
    assert torch.equal(states[1], states[2])
    rest, last = inputs.run(states[1:2], [0, 13], [12], slice(7, 20))
    assert torch.equal(rest, out[7:])
    assert torch.equal(last[0], states[3])


def test_the_state_that_is_read_stays_unchanged() -> None:
    inputs, state = Inputs(4), torch.randn(1, HEADS, K, V)
    before = state.clone()
    inputs.run(state, [0, 4], [3])
    assert torch.equal(state, before)
