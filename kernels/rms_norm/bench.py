"""The benchmark of the norm: a hidden state, query heads, gated heads of the delta net."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.rms_norm import launch

MAX_ERROR = 3e-3
EPS = 1e-6
ROTATED_BYTES = 240_000_000


def cases() -> Iterator[Case]:
    for tokens in (1, 16, 8192):
        name = f"rms_norm D=4096 T={tokens}"
        yield Case("rms_norm", name, partial(_plain, (tokens, 4096), "cuda"))
    yield Case("rms_norm", "rms_norm 64x512 heads T=2048", partial(_plain, (2048, 64, 512), "cuda"))
    for tokens in (1, 2048):
        name = f"rms_norm_gated 48x128 T={tokens}"
        yield Case("rms_norm", name, partial(_gated, (tokens, 48, 128), "cuda"))


def _sets(nbytes: int) -> int:
    return max(1, min(4, ROTATED_BYTES // nbytes))


def _plain(shape: tuple[int, ...], device: str) -> Work:
    weight = torch.randn(shape[-1], device=device).bfloat16()
    nbytes = 4 * torch.Size(shape).numel()
    inputs = [torch.randn(shape, device=device).bfloat16() for _ in range(_sets(nbytes))]
    calls = [partial(launch.rms_norm, x, weight, EPS, None, False, torch.bfloat16) for x in inputs]
    exact = normalised(inputs[0]) * weight.double()
    return Work(calls, partial(error, exact, calls[0]), MAX_ERROR, nbytes, 0.0)


def _gated(shape: tuple[int, ...], device: str) -> Work:
    weight = torch.randn(shape[-1], device=device).bfloat16()
    nbytes = 8 * torch.Size(shape).numel()
    inputs = [
        (torch.randn(shape, device=device), torch.randn(shape, device=device).bfloat16())
        for _ in range(_sets(nbytes))
    ]
    calls = [partial(launch.rms_norm_gated, x, gate, weight, EPS, "silu") for x, gate in inputs]
    x, gate = inputs[0]
    exact = normalised(x) * weight.double() * torch.nn.functional.silu(gate.double())
    return Work(calls, partial(error, exact, calls[0]), MAX_ERROR, nbytes, 0.0)


def normalised(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def error(exact: torch.Tensor, call: Callable[[], torch.Tensor]) -> float:
    return float((call().double() - exact).norm() / exact.norm())
