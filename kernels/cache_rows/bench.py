"""The benchmark of the row kernels: 8192 rows of each kind, there and back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.cache_rows import (
    COMPRESSED_ROWS,
    INDEX_ROWS,
    WINDOW_ROWS,
    RowFormat,
    latent_rows,
    launch,
    reference,
)

ROWS, SETS, CHECKED_ROWS = 8192, 8, 256
KINDS: tuple[tuple[str, RowFormat, int], ...] = (
    ("window", WINDOW_ROWS, 512),
    ("compressed", COMPRESSED_ROWS, 512),
    ("index", INDEX_ROWS, 128),
    ("latent", latent_rows(512, 64), 512),
)


def cases() -> Iterator[Case]:
    for name, form, width in KINDS:
        yield Case("cache_rows", f"encode {name} {ROWS}", partial(_encode, form, width))
    yield Case("cache_rows", f"decode latent {ROWS}", partial(_decode, KINDS[3][1], 512))


def inputs(width: int, device: str = "cuda") -> list[torch.Tensor]:
    return [torch.randn(ROWS, width, device=device).bfloat16() for _ in range(SETS)]


def _encode(form: RowFormat, width: int) -> Work:
    sets = inputs(width)
    calls = [partial(launch.encode_rows, values, form) for values in sets]

    def error() -> float:
        exact = reference.encode_rows(sets[0][:CHECKED_ROWS].cpu(), form)
        return float((calls[0]()[:CHECKED_ROWS].cpu() != exact).double().mean())

    return Work(calls, error, 1e-9, ROWS * (2 * width + form.row_bytes(width)), 0.0)


def _decode(form: RowFormat, width: int) -> Work:
    sets = [launch.encode_rows(values, form) for values in inputs(width)]
    calls = [partial(launch.decode_rows, rows, form) for rows in sets]

    def error() -> float:
        exact = reference.decode_rows(sets[0][:CHECKED_ROWS].cpu(), form)
        return float((calls[0]()[:CHECKED_ROWS].cpu() != exact).double().mean())

    return Work(calls, error, 1e-9, ROWS * (4 * width + form.row_bytes(width)), 0.0)
