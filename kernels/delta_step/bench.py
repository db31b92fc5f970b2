"""The benchmark of the steps: decode and verification with the heads of Qwen3.8 and GLM-5.3.

The floor counts one read of a state and a write after every token. The peer has the recurrence
alone, its inputs already convolved, and keeps only the last state; its floor counts that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

from kernels import backend
from kernels.bench.case import Case, Work
from kernels.delta_step import Pools, Slots, Weights, launch, new_workspace

MAX_ERROR = 4e-3
MAX_STATE_ERROR = 1e-4
PEER_ERROR = 1e-2
ROTATED_BYTES = 240_000_000
EPS, L2_EPS, BOUND = 1e-6, 1e-6, -5.0
WIDTH = 128  # of keys and values


@dataclass(frozen=True)
class Layer:
    """Heads of a delta net, whose decays are one a head, or one a key channel."""

    name: str
    key_heads: int
    heads: int
    channel_decay: bool

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.heads) * WIDTH

    @property
    def decays(self) -> int:
        return self.heads * WIDTH if self.channel_decay else self.heads

    @property
    def state_bytes(self) -> int:
        """Of the matrices and the window of a sequence."""
        return 4 * self.heads * WIDTH * WIDTH + 6 * self.channels

    def bytes_of(self, sequences: int, tokens: int, states: int) -> float:
        """Projections in, outputs out, and `states` states of every sequence."""
        row = 2 * self.channels + 4 * (self.decays + self.heads) + 4 * self.heads * WIDTH
        return float(sequences * (tokens * row + states * self.state_bytes))


GDN = Layer("GDN", 16, 48, channel_decay=False)
KDA = Layer("KDA", 64, 64, channel_decay=True)


def cases() -> Iterator[Case]:
    for layer in (GDN, KDA):
        for sequences, tokens in ((1, 1), (4, 1), (16, 1), (64, 1), (1, 4), (16, 4)):
            step = "decode" if tokens == 1 else f"verify {tokens}"
            yield Case(
                "delta_step",
                f"{layer.name} {step} B={sequences}",
                partial(ours, layer, sequences, tokens),
                {"fla-core": partial(peer, layer, sequences, tokens)},
            )


@dataclass(frozen=True)
class Inputs:
    """One step; decode leaves its state where it was."""

    layer: Layer
    qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    z: torch.Tensor
    weights: Weights
    pools: Pools
    slots: Slots

    def call(self, workspace: torch.Tensor) -> Callable[[], torch.Tensor]:
        rows = (self.qkv, self.a, self.b, self.z, self.weights, self.pools, self.slots)
        if self.layer.channel_decay:
            return partial(launch.kda_step, *rows, BOUND, workspace)
        return partial(launch.gated_delta_step, *rows, workspace)


def drawn(layer: Layer, sequences: int, tokens: int, device: str) -> Inputs:
    rows, states = sequences * tokens, 1 if tokens == 1 else 1 + tokens
    qkv, a, b, z = (
        torch.randn(rows, width, device=device)
        for width in (layer.channels, layer.decays, layer.heads, layer.heads * WIDTH)
    )
    rate_type = torch.float32 if layer.channel_decay else torch.bfloat16
    weights = Weights(
        torch.randn(layer.channels, 4, device=device).bfloat16(),
        torch.randn(layer.heads, device=device).to(rate_type),
        torch.randn(layer.decays, device=device).to(rate_type),
        torch.randn(WIDTH, device=device).bfloat16(),
        EPS,
        "sigmoid",
    )
    pools = Pools(
        torch.randn(sequences * states, 3, layer.channels, device=device).bfloat16(),
        torch.randn(sequences * states, layer.heads, WIDTH, WIDTH, device=device),
    )
    read = torch.arange(sequences, device=device)
    write = read[:, None] + sequences * torch.arange(tokens, device=device)
    slots = Slots(read, write if tokens == 1 else write + sequences, torch.full_like(read, tokens))
    return Inputs(layer, qkv.bfloat16(), a, b, z.bfloat16(), weights, pools, slots)


def sets(nbytes: float) -> int:
    """How many rotate, so that no cache holds them."""
    return max(2, min(64, int(ROTATED_BYTES / nbytes)))


def ours(layer: Layer, sequences: int, tokens: int, device: str = "cuda") -> Work:
    nbytes = layer.bytes_of(sequences, tokens, 1 + tokens)
    inputs = [drawn(layer, sequences, tokens, device) for _ in range(sets(nbytes))]
    workspace = new_workspace(sequences, inputs[0].pools)
    calls = [x.call(workspace) for x in inputs]

    def error() -> float:
        wanted = [exact(inputs[0], s) for s in (0, sequences - 1)]
        return error_of(calls[0](), inputs[0], wanted)

    return Work(calls, error, MAX_ERROR, nbytes, 0.0)


Exact = tuple[torch.Tensor, torch.Tensor]


def error_of(out: torch.Tensor, inputs: Inputs, wanted: list[Exact]) -> float:
    """Of the outputs of the first and the last sequence; infinite where a state is wrong."""
    sequences, tokens = inputs.slots.write_BN.shape
    found = out.view(sequences, tokens, -1)
    worst = 0.0
    for s, (expected, state) in zip((0, sequences - 1), wanted, strict=True):
        last = inputs.pools.delta_SHKV[int(inputs.slots.write_BN[s, -1])]
        if not relative(last, state) <= MAX_STATE_ERROR:
            return float("inf")
        worst = max(worst, relative(found[s], expected.flatten(1)))
    return worst


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN where an element was not written."""
    return float((found.double() - expected).norm() / expected.norm())


def exact(inputs: Inputs, s: int) -> Exact:
    """fp64 outputs [N, H, V] of sequence s and its last state, before the step is run."""
    layer, weights, slots = inputs.layer, inputs.weights, inputs.slots
    tokens = slots.write_BN.shape[1]
    rows, slot = slice(s * tokens, (s + 1) * tokens), int(slots.read_B[s])
    text = torch.cat([inputs.pools.window_SRC[slot], inputs.qkv[rows]]).double()
    taps = weights.conv_CJ.double()
    mixed = sum(text[j : j + tokens] * taps[:, j] for j in range(4))
    mixed = torch.nn.functional.silu(torch.as_tensor(mixed)).bfloat16().double()
    heads = mixed.view(tokens, -1, WIDTH)
    q, k, v = heads.split([layer.key_heads, layer.key_heads, layer.heads], dim=1)
    rate = weights.a_log_H.double().exp()[:, None]
    pace = (inputs.a[rows].double() + weights.dt_bias.double()).view(tokens, layer.heads, -1)
    if layer.channel_decay:
        decay = BOUND * torch.sigmoid(rate * pace)
    else:
        decay = -rate * torch.nn.functional.softplus(pace)
    beta = torch.sigmoid(inputs.b[rows].double())
    o, state = recurrence(q, k, v, decay, beta, inputs.pools.delta_SHKV[slot].double())
    o = o * (o.square().mean(-1, keepdim=True) + EPS).rsqrt() * weights.norm_V.double()
    return o * torch.sigmoid(inputs.z[rows].double()).view(o.shape), state


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> Exact:
    """fp64 q, k [N, G, K], v [N, H, V], decay [N, H, K or 1], beta [N, H], state [H, K, V]."""
    heads = v.shape[1]
    q, k = (x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    out = torch.empty_like(v)
    for n in range(len(v)):
        state = state * decay[n].exp()[:, :, None]
        u = beta[n][:, None] * (v[n] - torch.einsum("hkv,hk->hv", state, k[n]))
        state = state + k[n][:, :, None] * u[:, None]
        out[n] = torch.einsum("hkv,hk->hv", state, q[n]) * WIDTH**-0.5
    return out, state


def peer(layer: Layer, sequences: int, tokens: int) -> Work | None:
    if not backend.has_package("fla"):
        return None
    nbytes = layer.bytes_of(sequences, tokens, 2)
    given = [peer_inputs(layer, sequences, tokens) for _ in range(sets(nbytes))]
    calls = [partial(peer_step(layer), **x, **PEER_OPTIONS) for x in given]

    def error() -> float:
        q, k, v, g, beta, state = (x[0].double() for x in given[0].values())
        decay = g if layer.channel_decay else g[..., None]
        expected, _ = recurrence(q, k, v, decay, beta, state)
        return relative(calls[0]()[0][0], expected)

    return Work(calls, error, PEER_ERROR, nbytes, 0.0)


PEER_OPTIONS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


def peer_step(layer: Layer) -> Callable[..., Any]:
    operation = "kda" if layer.channel_decay else "gated_delta_rule"
    step: Callable[..., Any]
    step = getattr(import_module(f"fla.ops.{operation}"), f"fused_recurrent_{operation}")
    return step


def peer_inputs(layer: Layer, sequences: int, tokens: int) -> dict[str, torch.Tensor]:
    """What the convolution and the gates would give."""
    shape = (sequences, tokens)
    bounds = (0, layer.key_heads, 2 * layer.key_heads, 2 * layer.key_heads + layer.heads)
    q, k, v = (
        torch.randn(*shape, stop - start, WIDTH, device="cuda").bfloat16()
        for start, stop in pairwise(bounds)
    )
    decays = (*shape, layer.heads, WIDTH) if layer.channel_decay else (*shape, layer.heads)
    state = torch.randn(sequences, layer.heads, WIDTH, WIDTH, device="cuda")
    return {
        "q": q, "k": k, "v": v, "g": -torch.rand(decays, device="cuda"),
        "beta": torch.rand(*shape, layer.heads, device="cuda"), "initial_state": state,
    }  # fmt: skip
