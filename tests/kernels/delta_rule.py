"""Inputs of the delta rules, and the recurrence token by token in double precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
