"""The benchmark of the rotation: index queries of DeepSeek-V4 for one token, and for many."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.hadamard import launch, reference

HEADS, WIDTH, SETS = 64, 128, 4
TOKENS = (1, 4096)
MAX_ERROR = 4e-3  # of bf16 output


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        yield Case("hadamard", f"{WIDTH} T={tokens} H={HEADS}", partial(_work, tokens))


def _work(tokens: int) -> Work:
    sets = [torch.randn(tokens, HEADS, WIDTH, device="cuda").bfloat16() for _ in range(SETS)]
    calls = [partial(launch.hadamard, x) for x in sets]

    def error() -> float:
        exact = reference.hadamard(sets[0][:1].cpu().float()).double()
        return float((calls[0]()[:1].cpu().double() - exact).norm() / exact.norm())

    return Work(calls, error, MAX_ERROR, 2 * sets[0].nbytes, 0.0)
