"""Calls of the delta rules, and the recurrence token by token in double precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch

from kernels.gated_delta import Slots
from kernels.gated_delta.launch import States

BOUND = 5e-3
# Of one decay, and what is given to every rule: lengths, tokens of the writes.
LENGTHS = (
    ([1], [0]),
    ([63], [62, 5]),
    ([64], [63]),
    ([65], [64, 63, 0]),
    ([130], [129, 5, 63, 64, 100, 5]),
    ([1, 0, 70, 3], [0, 40, 70, 72]),
)


@dataclass
class Inputs:
    """Packed sequences of `lengths`; decays of heads, or of channels where `channels`."""

    lengths: list[int]
    channels: bool
    key_heads: int = 1
    heads: int = 2
    width: int = 32
    values: int = 32
    decay: float = 1.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        tokens, h, g, k, v = sum(self.lengths), self.heads, self.key_heads, self.width, self.values
        parts = torch.randn(tokens, 2 * g * k + h * v).bfloat16().to(self.device)
        self.q, self.k = (
            parts[:, i * g * k : (i + 1) * g * k].unflatten(1, (g, k)) for i in (0, 1)
        )
        self.v = parts[:, 2 * g * k :].unflatten(1, (h, v))
        shape = (tokens, h, k) if self.channels else (tokens, h)
        self.g = (-self.decay * torch.rand(shape)).to(self.device)
        self.beta = torch.rand(tokens, h).to(self.device)
        self.state = torch.randn(len(self.lengths), h, k, v).to(self.device)
        starts = [0, *torch.tensor(self.lengths).cumsum(0).tolist()]
        self.starts = torch.tensor(starts, device=self.device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """fp64 outputs [T, H, V], and the state [T, H, K, V] after every token."""
        repeat = self.heads // self.key_heads

        def unit(x: torch.Tensor) -> torch.Tensor:
            x = x.cpu().double().repeat_interleave(repeat, 1)
            return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

        q, k = unit(self.q) * self.width**-0.5, unit(self.k)
        v, g, beta = (x.cpu().double() for x in (self.v, self.g, self.beta))
        fade = (g if self.channels else g[..., None]).exp()[..., None]
        outs, states = [], []
        for b, length in enumerate(self.lengths):
            s = self.state[b].cpu().double()
            first = int(self.starts[b])
            for t in range(first, first + length):
                s = s * fade[t]
                u = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
                s = s + k[t][:, :, None] * u[:, None, :]
                outs.append(torch.einsum("hkv,hk->hv", s, q[t]))
                states.append(s)
        return torch.stack(outs), torch.stack(states)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.cpu().double() - exact).norm() / exact.norm())


@dataclass
class Call:
    """A launch of `rule` with writes after packed tokens, its results poisoned."""

    rule: Callable[..., None]
    x: Inputs
    writes: Sequence[int]
    out: torch.Tensor = field(init=False)
    states: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        x = self.x
        self.out = torch.full(x.v.shape, torch.nan, device=x.device)
        self.states = x.state.new_full((len(self.writes), *x.state.shape[1:]), torch.nan)
        self._token = torch.tensor(self.writes, dtype=torch.int64, device=x.device)

    def run(self) -> Call:
        states = States(self.x.state, self.states)
        self.rule(*self.x.tensors, states, self.x.starts, self._token, self.out)
        return self

    def change(self, lengths: list[int], writes: Sequence[int]) -> None:
        """Other sequences of as many tokens, and other writes, in the same memory."""
        self.x.lengths, self.writes = lengths, writes
        self.x.starts.copy_(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]))
        self._token.copy_(torch.tensor(writes))

    def check(self) -> None:
        """All writes are of tokens."""
        exact_out, exact_states = self.x.exact()
        assert error(self.out, exact_out) < BOUND
        assert error(self.states, exact_states[list(self.writes)]) < BOUND


def check_cut(rule: Callable[..., None], x: Inputs, cut: int) -> None:
    """One sequence in a call equals two calls, the second from the state that the first wrote."""
    tokens = x.lengths[0]
    whole = Call(rule, x, [cut - 1, tokens - 1]).run()
    state, outs = x.state, []
    for part in (slice(0, cut), slice(cut, tokens)):
        piece = copy(x)
        piece.q, piece.k, piece.v, piece.g, piece.beta = (t[part] for t in x.tensors)
        piece.state, piece.starts = state, torch.tensor([0, len(piece.v)], device=x.device)
        call = Call(rule, piece, [len(piece.v) - 1]).run()
        state = call.states
        outs.append(call.out)
        after = 0 if part.start == 0 else 1
        assert error(state[0], whole.states[after].cpu().double()) < BOUND
    assert error(torch.cat(outs), whole.out.cpu().double()) < BOUND


def check_writes_out_of_range(rule: Callable[..., None], x: Inputs) -> None:
    """`x` has 9 tokens."""
    states = Call(rule, x, [-1, 8, 9, 2**40]).run().states
    assert error(states[1], x.exact()[1][8]) < BOUND
    assert states[[0, 2, 3]].isnan().all()


def check_pool(rule: Callable[..., None], x: Inputs) -> None:
    """A pool is read and written by slot; `x` has sequences of 3 and 66 tokens."""
    pool = torch.randn(4, *x.state.shape[1:]).to(x.device)
    before = pool.clone()
    x.state = torch.stack([torch.zeros_like(pool[0]), pool[2]])
    slots = Slots(*(torch.tensor(s, device=x.device) for s in ([-1, 2], [3, 2, 99])))
    out = torch.full(x.v.shape, torch.nan, device=x.device)
    token = torch.tensor([2, 68, 30], device=x.device)
    rule(*x.tensors, States(pool, pool, slots), x.starts, token, out)
    exact_out, exact_states = x.exact()
    assert error(out, exact_out) < BOUND
    assert error(pool[[3, 2]], exact_states[[2, 68]]) < BOUND
    assert torch.equal(pool[:2], before[:2])
