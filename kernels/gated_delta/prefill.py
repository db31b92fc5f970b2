"""The benchmark of the prefill of a delta rule, which the operations of both rules give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels import backend
from kernels.bench.case import Case, Work

WIDTH = 128  # of keys and values
TOKENS = (64, 256, 1024, 4096, 8192)
PEER_TOKENS = 8192
MAX_ERROR = 6e-3
PEER_ERROR = 1e-2
CHECKED = 256  # tokens that are compared with the recurrence
SETS = 3

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Layer:
    """A layer of a model on one GPU.

    `decay` makes log decays of random numbers, [T, H] or, with `channel_decay`, [T, H, K]. `rule`
    and `reference` take what the operation takes; `peer` gives fla-core's function, called with
    `peer_options`.
    """

    operation: str
    key_heads: int
    heads: int
    channel_decay: bool
    decay: Callable[[torch.Tensor], torch.Tensor]
    rule: Callable[..., Tensors]
    reference: Callable[..., Tensors]
    peer: Callable[[], Callable[..., Any]]
    peer_options: tuple[tuple[str, bool], ...] = ()

    @property
    def gate_bytes(self) -> int:
        """Of a token, fp32: decays of channels, beside which beta is little; or decay and beta."""
        return 4 * self.heads * WIDTH if self.channel_decay else 8 * self.heads


def cases(layer: Layer) -> Iterator[Case]:
    for tokens in TOKENS:
        peers = {"fla": partial(_fla, layer, tokens)} if tokens == PEER_TOKENS else {}
        name = f"prefill {layer.heads} heads T={tokens}"
        yield Case(layer.operation, name, partial(work, layer, tokens), peers)


def inputs(layer: Layer, tokens: int, device: str = "cuda") -> Tensors:
    """q, k, v, decay, beta and the state."""
    keys, heads = layer.key_heads * WIDTH, layer.heads
    row = torch.randn(tokens, 2 * keys + heads * WIDTH, device=device).bfloat16()
    q, k = (row[:, i * keys : (i + 1) * keys].unflatten(1, (-1, WIDTH)) for i in (0, 1))
    v = row[:, 2 * keys :].unflatten(1, (heads, WIDTH))
    shape = (tokens, heads, WIDTH) if layer.channel_decay else (tokens, heads)
    decay = layer.decay(torch.randn(shape, device=device) - 2)
    beta = torch.rand(tokens, heads, device=device)
    return q, k, v, decay, beta, torch.randn(1, heads, WIDTH, WIDTH, device=device) * 0.1


def work(layer: Layer, tokens: int, device: str = "cuda") -> Work:
    sets = [inputs(layer, tokens, device) for _ in range(SETS)]
    starts, token = (torch.tensor(x, device=device) for x in ([0, tokens], [tokens - 1]))
    calls = [partial(layer.rule, *x, starts, token, out_dtype=torch.bfloat16) for x in sets]
    return Work(calls, partial(_error, layer, sets[0], calls[0]), MAX_ERROR, *cost(layer, tokens))


def cost(layer: Layer, tokens: int) -> tuple[float, float]:
    """Bytes, and operations of chunks of 64 tokens."""
    row = 4 * (layer.key_heads + layer.heads) * WIDTH + layer.gate_bytes
    state = layer.heads * WIDTH * WIDTH
    return float(tokens * row + 8 * state), 12.0 * tokens * state


def _error(layer: Layer, given: Tensors, call: Callable[[], Tensors]) -> float:
    """Of the first outputs against the recurrence in fp32."""
    *rows, state = given
    count = min(CHECKED, len(rows[0]))
    starts, token = (torch.tensor(x, device=state.device) for x in ([0, count], [count - 1]))
    first = (x[:count].contiguous() for x in rows)
    exact, _ = layer.reference(*first, state, starts, token)
    found = call()[0][:count].float()
    return float((found - exact).norm() / exact.norm())


def _fla(layer: Layer, tokens: int) -> Work | None:
    if not backend.has_package("fla"):
        return None
    rule, options = layer.peer(), dict(layer.peer_options)
    sets = [tuple(x.contiguous() for x in inputs(layer, tokens)) for _ in range(SETS)]

    def call(given: Tensors) -> Tensors:
        *rows, beta, state = given
        out, last = rule(
            *(x[None] for x in rows), beta=beta.bfloat16()[None], initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=True, **options,
        )  # fmt: skip
        return out[0], last

    calls = [partial(call, x) for x in sets]
    return Work(calls, partial(_error, layer, sets[0], calls[0]), PEER_ERROR, *cost(layer, tokens))
