"""Absorbed latent attention against expanded keys and values."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.mla import absorb_queries, expand_values, mla_attention
from kernels.quant_linear import PlainMatrix
from tests.kernels.test_row_independence import assert_rows_independent

HEADS, KEY, VALUE, LATENT = 3, 20, 12, 32
TOKENS, PAGE = 30, 4


def run(q_THK, latents_PNC, table, sequence, selected, kv_b: PlainMatrix):
    mixed = mla_attention(
        absorb_queries(q_THK, kv_b),
        latents_PNC,
        table,
        sequence,
        scale=KEY**-0.5,
        selected_TS=selected,
    )
    return expand_values(mixed, kv_b, VALUE)


@pytest.fixture
def kv_b() -> PlainMatrix:
    return PlainMatrix(torch.randn(HEADS * (KEY + VALUE), LATENT) * LATENT**-0.5)


def selection() -> torch.Tensor:
    """Every token sees itself and a random part of what lies before it."""
    rows = torch.full((TOKENS, TOKENS), -1)
    for t in range(TOKENS):
        seen = (torch.rand(t + 1) < 0.6).index_fill_(0, torch.tensor([t]), True).nonzero()[:, 0]
        rows[t, : len(seen)] = seen
    return rows


def test_absorbed_attention_equals_expanded_attention(kv_b: PlainMatrix) -> None:
    q, latents, selected = torch.randn(TOKENS, HEADS, KEY), torch.randn(TOKENS, LATENT), selection()
    expanded = (latents @ kv_b.data.t()).view(TOKENS, HEADS, KEY + VALUE).transpose(0, 1)
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for t in range(TOKENS):
        mask[t, selected[t][selected[t] >= 0]] = True
    expected = scaled_dot_product_attention(
        q.transpose(0, 1), expanded[..., :KEY], expanded[..., KEY:], attn_mask=mask
    ).transpose(0, 1)
    table = torch.randperm(8)
    pool = torch.full((8, PAGE, LATENT), float("nan"))
    for position, latent in enumerate(latents):
        pool[table[position // PAGE], position % PAGE] = latent
    sequence = torch.zeros(TOKENS, dtype=torch.int64)
    found = run(q, pool, table[None], sequence, selected, kv_b)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_rows_are_independent(kv_b: PlainMatrix) -> None:
    q, pool, selected = torch.randn(TOKENS, HEADS, KEY), torch.randn(8, PAGE, LATENT), selection()
    table, sequence = torch.randperm(8)[None], torch.zeros(TOKENS, dtype=torch.int64)
    assert_rows_independent(
        lambda rows: run(q[rows], pool, table, sequence[rows], selected[rows], kv_b),
        torch.arange(TOKENS),
    )


def test_released_widths_are_independent_of_the_rows() -> None:
    wide = PlainMatrix(torch.randn(4 * 512, 512).bfloat16())
    assert_rows_independent(lambda q: absorb_queries(q, wide), torch.randn(19, 4, 256))
    assert_rows_independent(lambda o: expand_values(o, wide, 256), torch.randn(19, 4, 512))
