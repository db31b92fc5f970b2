"""The benchmark of SwiGLU's product at the widths of the served models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.activation import launch
from kernels.bench.case import Case, Work

SHAPES = ((1, 2048), (16, 2048), (8192, 2048), (8192, 17408))
MAX_ERROR = 3e-3
LIMIT = 10.0
ROTATED_BYTES = 240_000_000


def cases() -> Iterator[Case]:
    for tokens, width in SHAPES:
        name = f"silu_and_mul W={width} T={tokens}"
        yield Case("activation", name, partial(_work, tokens, width, "cuda"))


def _work(tokens: int, width: int, device: str) -> Work:
    nbytes = 6 * tokens * width
    sets = max(1, min(4, ROTATED_BYTES // nbytes))
    pairs = [_pair(tokens, width, device) for _ in range(sets)]
    calls = [partial(launch.silu_and_mul, gate, up, LIMIT) for gate, up in pairs]
    return Work(calls, partial(error, *pairs[0], calls[0]), MAX_ERROR, nbytes, 0.0)


def _pair(tokens: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = torch.randn(2, tokens, width, device=device).mul_(6).bfloat16()
    return gate, up


def error(gate: torch.Tensor, up: torch.Tensor, call: Callable[[], torch.Tensor]) -> float:
    found = call()
    g, u = gate.double().clamp(max=LIMIT), up.double().clamp(-LIMIT, LIMIT)
    exact = torch.nn.functional.silu(g) * u
    return float((found.double() - exact).norm() / exact.norm())
