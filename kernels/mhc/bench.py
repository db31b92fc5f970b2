"""The benchmark of hyper-connections: one half of a layer of DeepSeek-V4, random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.mhc import launch
from kernels.mhc.exact import expanded, mixing_weights, normed_collapse

WIDTH, STREAMS, VALUES, ITERATIONS = 4096, 4, 24, 20
EPS = 1e-6
TOKENS = (1, 16, 8192)
MAX_ERROR = 5e-3  # two roundings to bf16
SETS = 4
CHECKED = 64
Outputs = tuple[torch.Tensor, torch.Tensor, launch.Weights]


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        make = partial(_fused, tokens, WIDTH, "cuda")
        yield Case("mhc", f"post and next pre V4 T={tokens}", make)
    for tokens in (1, 8192):
        yield Case("mhc", f"pre V4 T={tokens}", partial(_pre, tokens, WIDTH, "cuda"))


class Inputs:
    """Streams, a block's output and the weights of the sublayer that ends; the next mixer."""

    def __init__(self, tokens: int, width: int, device: str) -> None:
        self.x = torch.randn(tokens, STREAMS, width, device=device).bfloat16()
        self.y = torch.randn(tokens, width, device=device).bfloat16()
        self.post = torch.rand(tokens, STREAMS, device=device)
        self.comb = torch.rand(tokens, STREAMS, STREAMS, device=device) / 2
        self.norm = torch.randn(width, device=device).bfloat16()
        fn = torch.randn(VALUES, STREAMS * width, device=device) * (STREAMS * width) ** -0.5
        base, scale = torch.randn(VALUES, device=device), torch.rand(3, device=device) + 0.5
        self.mixer = launch.Mixer(fn, base, scale, EPS, EPS, ITERATIONS, 2.0)

    def pre(self) -> Outputs:
        return launch.pre(self.x, self.mixer, self.norm)

    def post_pre(self) -> Outputs:
        expanded = (self.y, (self.post, self.post, self.comb))
        return launch.pre(self.x, self.mixer, self.norm, None, expanded)


def _fused(tokens: int, width: int, device: str) -> Work:
    inputs = _inputs(tokens, width, device)
    moved = tokens * width * 2 * (2 * STREAMS + 2) + inputs[0].mixer.fn_MX.nbytes
    calls = [one.post_pre for one in inputs]
    check = partial(error, inputs[0], calls[0], expands=True)
    return Work(calls, check, MAX_ERROR, moved, 2.0 * tokens * VALUES * STREAMS * width)


def _pre(tokens: int, width: int, device: str) -> Work:
    inputs = _inputs(tokens, width, device)
    moved = tokens * width * 2 * (STREAMS + 1) + inputs[0].mixer.fn_MX.nbytes
    calls = [one.pre for one in inputs]
    check = partial(error, inputs[0], calls[0], expands=False)
    return Work(calls, check, MAX_ERROR, moved, 2.0 * tokens * VALUES * STREAMS * width)


def _inputs(tokens: int, width: int, device: str) -> Sequence[Inputs]:
    return [Inputs(tokens, width, device) for _ in range(SETS if tokens <= 1024 else 1)]


def error(inputs: Inputs, call: Callable[[], Outputs], *, expands: bool) -> float:
    """The largest of all outputs, in the first and last tokens."""
    out, found, weights = call()
    rows = list(range(len(out)))
    rows = rows if len(rows) <= CHECKED else rows[: CHECKED // 2] + rows[-CHECKED // 2 :]
    pairs = []
    if expands:
        given = (inputs.x[rows], inputs.y[rows], inputs.post[rows], inputs.comb[rows])
        pairs.append((out[rows], expanded(*given)))
    exact = mixing_weights(out[rows], inputs.mixer)
    pairs += [(one[rows], other) for one, other in zip(weights, exact, strict=True)]
    pairs.append((found[rows], normed_collapse(out[rows], exact[0], inputs.norm, EPS)))
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
    return max(errors) if all(e == e for e in errors) else float("inf")
