"""Gated delta rule: a recurrence over a matrix state per head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import backend
from kernels.gated_delta import reference

# Legend: T packed tokens, B sequences, G key heads, H value heads, K key dim, V value dim,
# W writes, S slots.


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots int64 of a pool of states [S, H, K, V]: where sequences read, and where writes go.

    Out of range, a sequence starts from zeros and a write is left out. The slot of a write is no
    other's, and read by no other sequence of the call.
    """

    read_B: torch.Tensor
    write_W: torch.Tensor


def gated_delta(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_THV: torch.Tensor,
    decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    state_BHKV: torch.Tensor,
    starts_B1: torch.Tensor,
    write_token_W: torch.Tensor,
    *,
    slots: Slots | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over packed sequences.

    Per token: q, k scaled to unit length (q also by K^-1/2), then
    S = exp(decay) S; u = beta (v - S^T k); S = S + k u^T; o = S^T q. Value head h reads key head
    h // (H / G). q, k, v of any float type; decay (log space, <= 0), beta and state fp32.
    `starts` int64 [B + 1]; `state` is each sequence's state before its first token and stays
    unchanged. Returns o [T, H, V] in `out_dtype` and the states fp32 [W, H, K, V] after the packed
    tokens `write_token` int64 [W]; of a token out of range the row is left as it is. With `slots`
    `state` is a pool, changed in place, and returned in place of the states.

    On a GPU nothing synchronises, and q, k, v may be slices of wider rows; chunks of 64 tokens
    from a sequence's own start, whatever else is in the batch; products of operands rounded to
    bf16, sums and states fp32: 5e-3 of the outputs and states of random inputs, more the more keys
    resemble each other (8e-3 where half of each is shared); a log decay below -30 counts as -30.
    Source: gated delta rule of Qwen3.5 / Qwen4-Exp (recurrent form); chunks: arXiv 2412.06464.
    """
    assert q_TGK.shape == k_TGK.shape and v_THV.shape[1] % k_TGK.shape[1] == 0
    assert decay_TH.dtype == beta_TH.dtype == state_BHKV.dtype == torch.float32
    assert state_BHKV.shape[1:] == (*v_THV.shape[1:2], k_TGK.shape[2], v_THV.shape[2])
    inputs = (q_TGK, k_TGK, v_THV, decay_TH, beta_TH)
    if not backend.uses_triton(v_THV):
        return recur(
            reference.gated_delta, inputs, state_BHKV, starts_B1, write_token_W, slots, out_dtype
        )
    from kernels.gated_delta import launch

    out = torch.empty(v_THV.shape, dtype=out_dtype, device=v_THV.device)
    states = launch.states_of(state_BHKV, write_token_W, slots)
    launch.gated_delta(*inputs, states, starts_B1, write_token_W, out)
    return out, states.written


def recur(
    rule: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: tuple[torch.Tensor, ...],
    state: torch.Tensor,
    starts_B1: torch.Tensor,
    write_token_W: torch.Tensor,
    slots: Slots | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference `rule` with the states where `slots` says."""
    if slots is None:
        out, states = rule(*inputs, state, starts_B1, write_token_W)
        return out.to(out_dtype), states
    known = (slots.read_B >= 0) & (slots.read_B < len(state))
    read = state[slots.read_B.where(known, 0)] * known.view(-1, 1, 1, 1)
    out, states = rule(*inputs, read, starts_B1, write_token_W)
    tokens = (write_token_W >= 0) & (write_token_W < starts_B1[-1])
    written = tokens & (slots.write_W >= 0) & (slots.write_W < len(state))
    state[slots.write_W[written]] = states[written]
    return out.to(out_dtype), state
