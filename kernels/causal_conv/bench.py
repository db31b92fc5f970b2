"""The benchmark of the convolution: channels of the delta nets in prefill, n-gram layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.causal_conv import Packed, launch

TAPS = 4
MAX_ERROR = 3e-3
ROTATED_BYTES = 240_000_000


@dataclass(frozen=True)
class Shape:
    """`sequences` of equally many tokens each, which all leave a window."""

    name: str
    sequences: int
    tokens: int
    channels: int
    dilation: int = 1

    @property
    def window(self) -> int:
        return (TAPS - 1) * self.dilation

    @property
    def nbytes(self) -> float:
        """Rows in and out, windows in and out, in bf16."""
        return 4.0 * self.sequences * self.channels * (self.tokens + self.window)


SHAPES = (
    Shape("GDN", 1, 8192, 10240),
    Shape("KDA", 1, 8192, 24576),
    Shape("PLE", 16, 1, 10240, dilation=3),
    Shape("PLE", 1, 8192, 10240, dilation=3),
)


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        name = f"{shape.name} packed T={shape.sequences * shape.tokens}"
        yield Case("causal_conv", name, partial(packed, shape))
    yield Case("causal_conv", "GDN gathered T=8192", partial(gathered, SHAPES[0]))


@dataclass(frozen=True)
class Inputs:
    """One step."""

    x: torch.Tensor
    pool: torch.Tensor
    weight: torch.Tensor
    packed: Packed


def drawn(shape: Shape, device: str) -> Inputs:
    """Slots of a half that is read, and of one that is written."""
    count, tokens = shape.sequences, shape.tokens
    sequence = torch.arange(count, device=device).repeat_interleave(tokens)
    offset = torch.arange(count * tokens, device=device) % tokens
    numbers = torch.arange(count, device=device)
    places = (sequence, offset, numbers, numbers * tokens + tokens - 1, numbers, numbers + count)
    pool = torch.randn(2 * count, shape.window, shape.channels, device=device).bfloat16()
    x = torch.randn(count * tokens, shape.channels, device=device).bfloat16()
    weight = torch.randn(shape.channels, TAPS, device=device).bfloat16()
    return Inputs(x, pool, weight, Packed(*places))


def packed(shape: Shape, device: str = "cuda") -> Work:
    count = max(1, min(16, int(ROTATED_BYTES / shape.nbytes)))
    sets = [drawn(shape, device) for _ in range(count)]
    calls = [
        partial(launch.conv_packed, s.x, s.pool, s.weight, s.packed, shape.dilation) for s in sets
    ]
    first = sets[0]

    def error() -> float:
        found = calls[0]()
        wrong = relative_error(found, first, shape)
        last = torch.cat([first.pool[0], first.x[: shape.tokens]])[-shape.window :]
        return wrong if torch.equal(first.pool[shape.sequences], last) else float("inf")

    return Work(calls, error, MAX_ERROR, shape.nbytes, 0.0)


def gathered(shape: Shape, device: str = "cuda") -> Work:
    """The older pair: rows of a history that was made before. Two sets."""
    sets = [drawn(shape, device) for _ in range(2)]
    tokens = torch.arange(shape.tokens, device=device)
    rows = tokens[:, None] + torch.arange(TAPS, device=device)
    calls = [partial(launch.causal_conv, torch.cat([s.pool[0], s.x]), rows, s.weight) for s in sets]
    return Work(
        calls, lambda: relative_error(calls[0](), sets[0], shape), MAX_ERROR, shape.nbytes, 0.0
    )


def relative_error(found: torch.Tensor, inputs: Inputs, shape: Shape) -> float:
    """Of the first sequence."""
    window = shape.window
    text = torch.cat([inputs.pool[0], inputs.x[: shape.tokens]]).double()
    y = sum(
        text[j * shape.dilation : len(text) - window + j * shape.dilation]
        * inputs.weight[:, j].double()
        for j in range(TAPS)
    )
    exact = torch.nn.functional.silu(torch.as_tensor(y))
    return float((found[: shape.tokens].double() - exact).norm() / exact.norm())
