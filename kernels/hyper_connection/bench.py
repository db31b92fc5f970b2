"""The benchmark of gated hyper-connections at the sizes of Qwen3.8-Flash-Next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.hyper_connection import exact, launch

HIDDEN, COUNT, LOW = 2560, 4, 320
EPS = 1e-6
TOKENS = (1, 16, 4096)
MAX_ERROR = 1e-5
ROTATED_BYTES = 240_000_000
CHECKED = 64
Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        make = partial(_read, tokens, HIDDEN, LOW, "cuda")
        yield Case("hyper_connection", f"read Qwen3.8-Next T={tokens}", make)
        make = partial(_write, tokens, HIDDEN, "cuda")
        yield Case("hyper_connection", f"write Qwen3.8-Next T={tokens}", make)


def _matrices(hidden: int, low: int, device: str) -> Matrices:
    width = COUNT * hidden

    def random(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, device=device).mul_(k**-0.5).bfloat16()

    return random(low, width), random(width, low), random(COUNT, width)


def _read(tokens: int, hidden: int, low: int, device: str) -> Work:
    width = COUNT * hidden
    norm = torch.randn(width, device=device).bfloat16()
    streams = torch.randn(tokens, width, device=device)
    nbytes = 2 * width * (2 * low + COUNT) + 4 * tokens * (width + hidden)
    sets = max(1, min(20, ROTATED_BYTES // nbytes))
    matrices = [_matrices(hidden, low, device) for _ in range(sets)]
    calls = [partial(launch.read, streams, norm, *m, COUNT, EPS) for m in matrices]
    check = partial(read_error, streams, norm, matrices[0], calls[0])
    return Work(calls, check, MAX_ERROR, nbytes, 4.0 * tokens * width * low)


def read_error(
    streams: torch.Tensor,
    norm: torch.Tensor,
    matrices: Matrices,
    call: Callable[[], tuple[torch.Tensor, torch.Tensor | None]],
) -> float:
    """The larger of both outputs, in the first and last tokens."""
    rows = list(range(len(streams)))
    rows = rows if len(rows) <= CHECKED else rows[: CHECKED // 2] + rows[-CHECKED // 2 :]
    expected = exact.read(streams[rows], norm, matrices, COUNT, EPS)
    errors = []
    for found, other in zip(call(), expected, strict=True):
        assert found is not None
        errors.append(float((found[rows].double() - other).norm() / other.norm()))
    return max(errors) if all(e == e for e in errors) else float("inf")


def _write(tokens: int, hidden: int, device: str) -> Work:
    nbytes = tokens * hidden * (8 * COUNT + 2)
    sets = max(1, min(4, ROTATED_BYTES // nbytes))
    inject = torch.rand(tokens, COUNT, device=device)
    inputs = [
        (
            torch.randn(tokens, COUNT * hidden, device=device),
            torch.randn(tokens, hidden, device=device).bfloat16(),
        )
        for _ in range(sets)
    ]
    calls = [partial(launch.write, *pair, inject) for pair in inputs]
    return Work(calls, partial(write_error, *inputs[0], inject, calls[0]), MAX_ERROR, nbytes, 0.0)


def write_error(
    streams: torch.Tensor, y: torch.Tensor, inject: torch.Tensor, call: Callable[[], torch.Tensor]
) -> float:
    added = torch.einsum("th,tc->tch", y.double(), inject.double()).flatten(1)
    expected = streams.double() + added
    return float((call().double() - expected).norm() / expected.norm())
