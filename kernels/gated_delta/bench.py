"""The benchmark of the gated delta rule's prefill: a layer of Qwen3.8 on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch

from kernels import backend, gated_delta
from kernels.bench.case import Case, Work
from kernels.gated_delta import reference

KEY_HEADS, HEADS, WIDTH = 16, 48, 128
TOKENS = (64, 256, 1024, 4096, 8192)
PEER_TOKENS = 8192
MAX_ERROR = 6e-3
PEER_ERROR = 1e-2
CHECKED = 256  # tokens that are compared with the recurrence


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        peers = {"fla": partial(_fla, tokens)} if tokens == PEER_TOKENS else {}
        yield Case("gated_delta", f"prefill 48 heads T={tokens}", partial(work, tokens), peers)


def inputs(tokens: int, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """q, k, v, decay, beta and the state."""
    keys = KEY_HEADS * WIDTH
    row = torch.randn(tokens, 2 * keys + HEADS * WIDTH, device=device).bfloat16()
    q, k = (row[:, i * keys : (i + 1) * keys].unflatten(1, (KEY_HEADS, WIDTH)) for i in (0, 1))
    v = row[:, 2 * keys :].unflatten(1, (HEADS, WIDTH))
    decay = -torch.nn.functional.softplus(torch.randn(tokens, HEADS, device=device) - 2)
    beta = torch.rand(tokens, HEADS, device=device)
    return q, k, v, decay, beta, torch.randn(1, HEADS, WIDTH, WIDTH, device=device) * 0.1


def work(tokens: int, device: str = "cuda") -> Work:
    sets = [inputs(tokens, device) for _ in range(3)]
    starts, token = (torch.tensor(x, device=device) for x in ([0, tokens], [tokens - 1]))
    rule: Any = gated_delta.gated_delta
    calls = [partial(rule, *x, starts, token, out_dtype=torch.bfloat16) for x in sets]
    return Work(calls, partial(_error, sets[0], calls[0]), MAX_ERROR, *cost(tokens))


def cost(tokens: int) -> tuple[float, float]:
    """Bytes, and operations of chunks of 64 tokens."""
    values = 2 * KEY_HEADS * WIDTH + 2 * HEADS * WIDTH + 4 * HEADS
    state = 8.0 * HEADS * WIDTH * WIDTH
    return 2.0 * tokens * values + state, 12.0 * tokens * HEADS * WIDTH * WIDTH


def _error(given: tuple[torch.Tensor, ...], call: Callable[[], tuple[torch.Tensor, ...]]) -> float:
    """Of the first outputs against the recurrence in fp32."""
    q, k, v, decay, beta, state = given
    count = min(CHECKED, len(v))
    starts, token = (torch.tensor(x, device=v.device) for x in ([0, count], [count - 1]))
    first = (x[:count].contiguous() for x in (q, k, v, decay, beta))
    rule: Any = reference.gated_delta
    exact, _ = rule(*first, state, starts, token)
    found = call()[0][:count].float()
    return float((found - exact).norm() / exact.norm())


def _fla(tokens: int) -> Work | None:
    if not backend.has_package("fla"):
        return None
    rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    sets = [tuple(x.contiguous() for x in inputs(tokens)) for _ in range(3)]

    def call(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        *rows, beta, state = given
        out, last = rule(
            *(x[None] for x in rows), beta=beta.bfloat16()[None], initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return out[0], last

    calls = [partial(call, x) for x in sets]
    return Work(calls, partial(_error, sets[0], calls[0]), PEER_ERROR, *cost(tokens))
