"""The benchmark of Engram: rows from the host's page-locked memory, and the gate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.engram import launch, reference

ROWS, ROW_BYTES, HEADS = 400_000, 264, 24
STREAMS, WIDTH, EPS = 4, 5120, 1e-20
SETS = 3
EXACT, BF16_ERROR = 1e-9, 4e-3


def cases() -> Iterator[Case]:
    for tokens in (1, 16, 1024):
        name = f"gather {HEADS} x {ROW_BYTES} B from the host T={tokens}"
        yield Case("engram", name, partial(gathering, tokens, ROWS, "cuda"))
    for tokens in (1, 16, 8192):
        yield Case(
            "engram", f"gate {STREAMS} x {WIDTH} T={tokens}", partial(gating, tokens, "cuda")
        )


def gathering(tokens: int, rows: int, device: str) -> Work:
    """Bound by the bus to the host. A page-locked table of `rows`, values to bf16."""
    table = torch.randint(0, 0x7F, (rows, ROW_BYTES), dtype=torch.uint8)
    table[:, 256:] = torch.randint(110, 130, (rows, 8), dtype=torch.uint8)
    table = table.pin_memory() if device == "cuda" else table
    ids = [torch.randint(0, rows, (tokens, HEADS), device=device) for _ in range(SETS)]
    out = torch.empty(tokens, HEADS * 256, dtype=torch.bfloat16, device=device)
    calls = [partial(launch.gather_rows, table, each, out, scaled=True) for each in ids]

    def error() -> float:
        out.fill_(torch.nan)
        calls[0]()
        wanted = reference.gather_rows(table, ids[0].cpu()).bfloat16()
        return 0.0 if torch.equal(out.cpu(), wanted) else float("inf")

    read = tokens * HEADS
    return Work(calls, error, EXACT, read * (8 + 2.0 * 256), 0.0, host_nbytes=read * ROW_BYTES)


def gating(tokens: int, device: str) -> Work:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    streams = [random(tokens, STREAMS, WIDTH) for _ in range(SETS)]
    products = [random(tokens, (STREAMS + 1) * WIDTH) for _ in range(SETS)]
    q, k = random(STREAMS, WIDTH), random(STREAMS, WIDTH)
    keys = [p[:, : STREAMS * WIDTH].unflatten(1, (STREAMS, WIDTH)) for p in products]
    values = [p[:, STREAMS * WIDTH :] for p in products]
    out = torch.empty_like(streams[0])
    calls = [
        partial(launch.engram_gate, *each, q, k, None, out, EPS)
        for each in zip(streams, keys, values, strict=True)
    ]

    def error() -> float:
        out.fill_(torch.nan)
        calls[0]()
        x, key, weight = streams[0].double(), keys[0].double(), q.double() * k.double()
        dot = (x * weight * key).sum(-1) * (x.square().mean(-1) + EPS).rsqrt()
        dot = dot * (key.square().mean(-1) + EPS).rsqrt() * WIDTH**-0.5
        opening = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
        wanted = x + opening[..., None] * values[0].double()[:, None]
        return float((out.double() - wanted).norm() / wanted.norm())

    nbytes = 2.0 * tokens * WIDTH * (3 * STREAMS + 1) + 4.0 * STREAMS * WIDTH
    return Work(calls, error, BF16_ERROR, nbytes, 0.0)
