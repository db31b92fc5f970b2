"""The benchmark of GLM-5.3's latent attention: 2048 selected tokens, 64 heads, and products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.mla.launch import absorb_queries
from kernels.quant_linear import PlainMatrix
from kernels.sparse_attention.bench import Layer, work

HEADS, KEY, VALUE, LATENT = 64, 256, 256, 512
MAX_ERROR = 4e-3
MATRICES = 8  # that rotate: more than the caches hold
VISIBLE, SELECTED = 16_384, 2048


def cases() -> Iterator[Case]:
    for tokens in (1, 16, 1024):
        layer = Layer(f"GLM T={tokens}", tokens, VISIBLE, SELECTED, None, None, sinks=False)
        yield Case("mla", layer.name, partial(work, layer))
    for tokens in (1, 1024):
        yield Case("mla", f"absorb T={tokens}", partial(absorb, tokens))


def absorb(tokens: int, device: str = "cuda") -> Work:
    """Queries times the key rows of kv_b."""
    matrices = [
        PlainMatrix(torch.randn(HEADS * (KEY + VALUE), LATENT, device=device).bfloat16())
        for _ in range(MATRICES)
    ]
    q = torch.randn(tokens, HEADS, KEY, device=device).bfloat16()

    def error() -> float:
        found = absorb_queries(q, matrices[0])
        keys = matrices[0].data.view(HEADS, -1, LATENT)[:, :KEY].double()
        expected = torch.einsum("thk,hkc->thc", q.double(), keys)
        return float((found.double() - expected).norm() / expected.norm())

    calls = [partial(absorb_queries, q, matrix) for matrix in matrices]
    nbytes = 2.0 * HEADS * (KEY * LATENT + tokens * (KEY + LATENT))
    return Work(calls, error, MAX_ERROR, nbytes, 2.0 * tokens * HEADS * KEY * LATENT)
