"""The benchmark of the n-gram embedding gate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.ple import launch

STREAMS, WIDTH = 4, 2560
SETS = 3
MAX_ERROR = 1e-5


def cases() -> Iterator[Case]:
    for tokens in (1, 16, 4096):
        yield Case("ple", f"gate {STREAMS} x {WIDTH} T={tokens}", partial(gating, tokens, "cuda"))


def gating(tokens: int, device: str) -> Work:
    key, query = (
        [torch.randn(tokens, STREAMS * WIDTH, device=device) for _ in range(SETS)] for _ in "kq"
    )
    value = torch.randn(tokens, WIDTH, device=device)
    out = torch.empty_like(key[0])
    calls = [
        partial(launch.ple_gate, *pair, value, STREAMS, out)
        for pair in zip(key, query, strict=True)
    ]

    def error() -> float:
        out.fill_(torch.nan)
        calls[0]()
        product = (key[0].double() * query[0].double()).view(tokens, STREAMS, WIDTH)
        raw = product.sum(-1) * WIDTH**-0.5
        opening = torch.sigmoid(raw.sign() * raw.abs().clamp_min(1e-6).sqrt())
        wanted = (opening[..., None] * value.double()[:, None]).flatten(1)
        return float((out.double() - wanted).norm() / wanted.norm())

    return Work(calls, error, MAX_ERROR, 4.0 * tokens * WIDTH * (3 * STREAMS + 1), 0.0)
