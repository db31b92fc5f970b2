"""Latent attention over window rows and entries against a dense softmax with a sink column."""

from __future__ import annotations

import pytest
import torch

from kernels.compressor import write_entries
from kernels.paged_attention import write_pages
from kernels.sparse_attention import Entries, Rows, sparse_attention

HEADS, WIDTH = 4, 32
SCALE = WIDTH**-0.5


def paged(rows_LD: torch.Tensor, per_page: int, first_page: int = 0) -> Rows:
    """Rows of one sequence at random pages; entries nobody wrote are NaN."""
    count = -(-len(rows_LD) // per_page)
    pool = torch.full((count + 3, per_page, rows_LD.shape[1]), torch.nan)
    pages = torch.randperm(count + 3)[:count]
    padded = torch.full((count * per_page, rows_LD.shape[1]), torch.nan)
    padded[: len(rows_LD)] = rows_LD
    pool[pages] = padded.unflatten(0, (count, per_page))
    table = torch.full((1, first_page + count), -1)
    table[0, first_page:] = pages
    return Rows(pool, table)


def dense(q_HD: torch.Tensor, keys_LD: torch.Tensor, sinks_H: torch.Tensor) -> torch.Tensor:
    """fp64, by torch's own softmax over the logits and one more column."""
    q, keys, sinks = q_HD.double(), keys_LD.double(), sinks_H.double()
    logits = torch.cat([q @ keys.T * SCALE, sinks[:, None]], dim=1)
    return (logits.softmax(1)[:, :-1] @ keys).float()


@pytest.mark.parametrize("selected", [False, True])
def test_window_and_entries_equal_a_dense_softmax(selected: bool) -> None:
    tokens, ratio, window = 63, 4, 16
    rows, entries = torch.randn(tokens, WIDTH), torch.randn(tokens // ratio, WIDTH)
    q, sinks = torch.randn(tokens, HEADS, WIDTH), torch.randn(HEADS)
    positions = torch.arange(tokens)
    first, visible = (positions - window + 1).clamp_min(0), (positions + 1) // ratio
    chosen = torch.full((tokens, 3), -1)
    if selected:
        for t in range(tokens):
            best = torch.randperm(int(visible[t]))[:3].sort().values
            chosen[t, : len(best)] = best
    found = sparse_attention(
        q,
        paged(rows, 8),
        first,
        positions,
        torch.zeros_like(positions),
        sinks,
        scale=SCALE,
        entries=Entries(paged(entries, 4), visible, chosen if selected else None),
    )
    for t in range(tokens):
        named = chosen[t][chosen[t] >= 0] if selected else torch.arange(int(visible[t]))
        keys = torch.cat([rows[int(first[t]) : t + 1], entries[named]])
        torch.testing.assert_close(found[t], dense(q[t], keys, sinks), rtol=1e-4, atol=1e-5)


def test_a_range_may_reach_behind_the_own_position() -> None:
    """Tokens of an image see all of it."""
    rows, sinks = torch.randn(20, WIDTH), torch.randn(HEADS)
    q, window = torch.randn(1, HEADS, WIDTH), paged(rows, 8)
    at = torch.tensor([3]), torch.tensor([17]), torch.tensor([0])
    found = sparse_attention(q, window, *at, sinks, scale=SCALE)
    torch.testing.assert_close(found[0], dense(q[0], rows[3:18], sinks), rtol=1e-4, atol=1e-5)


def test_a_sink_takes_weight_and_gives_none() -> None:
    rows, q = torch.ones(1, WIDTH), torch.zeros(1, HEADS, WIDTH)
    at = torch.tensor([0]), torch.tensor([0]), torch.tensor([0])
    sinks = torch.tensor([0.0, -torch.inf, 60.0, -60.0])
    found = sparse_attention(q, paged(rows, 8), *at, sinks, scale=SCALE)
    weights = torch.tensor([0.5, 1.0, 0.0, 1.0])
    torch.testing.assert_close(found[0], weights[:, None].expand(HEADS, WIDTH), rtol=0, atol=1e-6)


@pytest.mark.parametrize("position", [131_071, 131_072, 131_200, 1_048_575])
def test_window_arithmetic_at_long_positions(position: int) -> None:
    """Only the pages of the last window are in the table, as when older ones were freed."""
    per_page, window = 64, 128
    first_page = (position - window + 1) // per_page
    start = first_page * per_page
    rows = torch.randn(position + 1 - start, WIDTH)
    q, sinks = torch.randn(1, HEADS, WIDTH), torch.randn(HEADS)
    at = torch.tensor([position - window + 1]), torch.tensor([position]), torch.tensor([0])
    found = sparse_attention(q, paged(rows, per_page, first_page), *at, sinks, scale=SCALE)
    torch.testing.assert_close(found[0], dense(q[0], rows[-window:], sinks), rtol=1e-4, atol=1e-5)


def test_rows_beyond_four_gibibytes_of_a_pool() -> None:
    """Element offsets past 2^31; memory is only reserved, two pages of it are touched."""
    pages, per_page, width = 66_000, 64, 512
    pool = torch.empty(pages, per_page, width, dtype=torch.bfloat16)
    assert pool.numel() > 2**31 and pool.nbytes > 2**32
    table = torch.tensor([[pages - 1, pages - 2]])
    rows = torch.randn(per_page + 3, width).to(torch.bfloat16)
    positions, sequence = torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.int64)
    write_pages(rows, pool, table, sequence, positions)
    assert torch.equal(pool[pages - 1], rows[:per_page])
    write_entries(rows[:4], pool, table, sequence[:4], torch.tensor([4, 11, 12, 263]), 4)
    q, sinks = torch.randn(1, HEADS, width), torch.randn(HEADS)
    at = torch.tensor([60]), torch.tensor([66]), torch.tensor([0])
    found = sparse_attention(q, Rows(pool, table), *at, sinks, scale=SCALE)
    keys = rows[60:].clone()
    keys[65 - 60] = rows[3]  # entry 65 was put in the place of row 65
    torch.testing.assert_close(found[0], dense(q[0], keys.float(), sinks), rtol=1e-4, atol=1e-5)
    assert torch.equal(pool[pages - 1, 2], rows[1])  # token 11 closed entry 2


def test_bf16_pools_are_read_exactly() -> None:
    rows, sinks = torch.randn(9, WIDTH).to(torch.bfloat16), torch.randn(HEADS)
    window = paged(rows.float(), 8)
    narrow = Rows(window.pool.to(torch.bfloat16), window.pages)
    q = torch.randn(1, HEADS, WIDTH)
    at = torch.tensor([0]), torch.tensor([8]), torch.tensor([0])
    wide_out = sparse_attention(q, window, *at, sinks, scale=SCALE)
    assert torch.equal(sparse_attention(q, narrow, *at, sinks, scale=SCALE), wide_out)
