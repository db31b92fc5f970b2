from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Tick:
    """Token i of every sequence that has one: `count` rows from `first` on, in time order."""

    first: int
    count: int
    writes: list[tuple[int, int]]  # (row within the tick, index of the write)


def gated_delta(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_THV: torch.Tensor,
    decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    state_BHKV: torch.Tensor,
    starts_B1: torch.Tensor,
    write_token_W: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, width = v_THV.shape[1:]
    time = time_order(starts_B1.tolist(), write_token_W.tolist())
    rows_T = torch.tensor(time.rows, device=q_TGK.device)

    def per_head(x_TGK: torch.Tensor) -> torch.Tensor:
        x = x_TGK.index_select(0, rows_T).float()
        x = x * x.square().sum(-1, keepdim=True).add_(L2_EPS).rsqrt_()
        return x.repeat_interleave(heads // x.shape[1], 1).flatten(0, 1)

    k = per_head(k_TGK)[:, :, None]
    q = per_head(q_TGK).mul_(q_TGK.shape[2] ** -0.5)[:, None, :]
    v = v_THV.index_select(0, rows_T).float().view(-1, 1, width)
    decay = decay_TH.index_select(0, rows_T).exp_().view(-1, 1, 1)
    beta = beta_TH.index_select(0, rows_T).view(-1, 1, 1)
    out_THV = torch.empty_like(v_THV, dtype=torch.float32)
    out, states_W = recur(time, q, k, v, decay, beta, state_BHKV, len(write_token_W))
    out_THV.index_copy_(0, rows_T, out.view(-1, heads, width))
    return out_THV, states_W


def recur(
    time: TimeOrder,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state_BHKV: torch.Tensor,
    writes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule over rows in time order, heads inside them: N = tokens * heads.

    q [N, 1, K], k [N, K, 1], v [N, 1, V]; decay [N, K, 1] or [N, 1, 1] as a factor, beta
    [N, 1, 1]. Gives [N, 1, V] and the states after the tokens of `writes` writes.
    """
    heads = state_BHKV.shape[1]
    out = torch.empty_like(v)
    order_B = torch.tensor(time.order, device=q.device)
    state = state_BHKV.index_select(0, order_B).flatten(0, 1)
    states_W = state_BHKV.new_empty(writes, *state_BHKV.shape[1:])
    for tick in time.ticks:
        now = slice(tick.first * heads, (tick.first + tick.count) * heads)
        s = state[: tick.count * heads]
        s.mul_(decay[now])
        u = (v[now] - torch.bmm(k[now].transpose(1, 2), s)).mul_(beta[now])
        s.add_(k[now] * u)
        torch.bmm(q[now], s, out=out[now])
        for row, write in tick.writes:
            states_W[write] = s[row * heads : (row + 1) * heads]
    return out, states_W


@dataclass(frozen=True, slots=True)
class TimeOrder:
    """Sequences longest first; packed rows by time, then sequence; the ticks over those rows."""

    order: list[int]
    rows: list[int]
    ticks: list[Tick]


def time_order(starts: list[int], write_tokens: list[int]) -> TimeOrder:
    """The order in which packed sequences are computed side by side."""
    lengths = [b - a for a, b in pairwise(starts)]
    order = sorted(range(len(lengths)), key=lambda b: -lengths[b])
    writes: dict[int, list[int]] = {}
    for write, token in enumerate(write_tokens):
        writes.setdefault(token, []).append(write)
    rows: list[int] = []
    ticks = []
    for i in range(max(lengths, default=0)):
        tokens = [starts[b] + i for b in order if lengths[b] > i]
        due = [(row, w) for row, t in enumerate(tokens) for w in writes.get(t, ())]
        ticks.append(Tick(len(rows), len(tokens), due))
        rows.extend(tokens)
    return TimeOrder(order, rows, ticks)
