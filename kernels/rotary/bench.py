"""The benchmark of rotary embeddings at the shapes of the served models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.rotary import launch

MAX_ERROR = 3e-3
FREQUENCIES = 32
ROTATED_BYTES = 240_000_000


def cases() -> Iterator[Case]:
    for tokens in (1, 2048):
        pairs = partial(_work, (tokens, 64, 512), "cuda", pairs=True)
        yield Case("rotary", f"tail pairs 64x512 T={tokens}", pairs)
        plain = partial(_work, (tokens, 24, 256), "cuda", pairs=False)
        yield Case("rotary", f"halves 24x256 T={tokens}", plain)


def _work(shape: tuple[int, int, int], device: str, *, pairs: bool) -> Work:
    nbytes = 4 * torch.Size(shape).numel() + 8 * shape[0] * FREQUENCIES
    sets = max(1, min(4, ROTATED_BYTES // nbytes))
    inputs = [torch.randn(shape, device=device).bfloat16() for _ in range(sets)]
    angles = torch.rand(shape[0], FREQUENCIES, device=device) * 6
    tables = (angles.cos(), angles.sin())
    turn = partial(launch.rotate_tail_pairs, inverse=False) if pairs else launch.apply_rotary
    calls = [partial(turn, x, *tables) for x in inputs]
    check = partial(error, exact(inputs[0], *tables, pairs=pairs), calls[0])
    return Work(calls, check, MAX_ERROR, nbytes, 0.0)


def exact(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, pairs: bool) -> torch.Tensor:
    """By multiplication of complex numbers, in fp64."""
    out, count = x.double(), cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[:, None]
    at = x.shape[2] - 2 * count if pairs else 0
    part = out[..., at : at + 2 * count]
    a, b = (part[..., ::2], part[..., 1::2]) if pairs else part.chunk(2, dim=-1)
    z = torch.complex(a.contiguous(), b.contiguous()) * turn
    y = torch.stack([z.real, z.imag], dim=-1 if pairs else -2).flatten(-2)
    return torch.cat([out[..., :at], y, out[..., at + 2 * count :]], dim=-1)


def error(expected: torch.Tensor, call: Callable[[], torch.Tensor]) -> float:
    return float((call().double() - expected).norm() / expected.norm())
