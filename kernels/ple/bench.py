"""The benchmark of n-gram embedding: row ids, rows from the host's memory, and the gate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.engram.launch import gather_rows
from kernels.ple import launch, reference

STREAMS, WIDTH = 4, 2560
ROWS, ROW_BYTES, HEADS, ORDER = 400_000, 160, 16, 3
SCALE, EOS = 0.25, 5
SETS = 3
EXACT, MAX_ERROR = 1e-9, 1e-5


def cases() -> Iterator[Case]:
    for tokens in (1, 8192):
        name = f"row ids of {ORDER} codes, {HEADS} heads T={tokens}"
        yield Case("ple", name, partial(hashing, tokens, "cuda"))
    for tokens in (1, 16, 1024):
        name = f"gather {HEADS} x {ROW_BYTES} B from the host T={tokens}"
        yield Case("ple", name, partial(gathering, tokens, ROWS, "cuda"))
    for tokens in (1, 16, 4096):
        yield Case("ple", f"gate {STREAMS} x {WIDTH} T={tokens}", partial(gating, tokens, "cuda"))


def hashing(tokens: int, device: str) -> Work:
    codes = [torch.randint(-1, 250_000, (tokens, ORDER), device=device) for _ in range(SETS)]
    for each in codes:
        each[:, 0].clamp_(min=0)
    multipliers = torch.randint(0, 1 << 43, (ORDER,), device=device) * 2 + 1
    sizes = torch.randint(19_000_000, 20_000_000, (HEADS,), device=device) * 2 + 1
    constants = (multipliers, sizes, sizes.cumsum(0) - sizes)
    calls = [partial(launch.hashed_rows, each, *constants, EOS) for each in codes]

    def error() -> float:
        factors, counts, starts = (x.cpu() for x in constants)
        wanted = reference.ngram_row_ids(codes[0].cpu(), factors, counts, starts, EOS)
        return 0.0 if torch.equal(calls[0]().cpu(), wanted) else float("inf")

    return Work(calls, error, EXACT, 8.0 * tokens * (ORDER + HEADS), 0.0)


def gathering(tokens: int, rows: int, device: str) -> Work:
    """Bound by the bus to the host. A page-locked table of `rows`, values to bf16."""
    table = torch.randint(0, 0x7F, (rows, ROW_BYTES), dtype=torch.uint8)
    table = table.pin_memory() if device == "cuda" else table
    ids = [torch.randint(0, rows, (tokens, HEADS), device=device) for _ in range(SETS)]
    out = torch.empty(tokens, HEADS * ROW_BYTES, dtype=torch.bfloat16, device=device)
    calls = [partial(gather_rows, table, each, out, scaled=False, scale=SCALE) for each in ids]

    def error() -> float:
        out.fill_(torch.nan)
        calls[0]()
        wanted = reference.gather_rows(table, ids[0].cpu(), SCALE).bfloat16()
        return 0.0 if torch.equal(out.cpu(), wanted) else float("inf")

    read = tokens * HEADS
    nbytes = read * (8 + 2.0 * ROW_BYTES)
    return Work(calls, error, EXACT, nbytes, 0.0, host_nbytes=read * ROW_BYTES)


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
