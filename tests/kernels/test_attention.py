"""Paged attention against torch's own attention; selection by brute force."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.paged_attention import paged_attention, write_pages
from kernels.qsa_index import mean_of_blocks, select_tokens, write_closed_blocks

HEADS, KV_HEADS, WIDTH, PAGE = 6, 2, 32, 4


def paged(length: int, page: int = PAGE, pages: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of randomly placed pages, and a NaN-filled pool shape holder."""
    table = torch.randperm(pages)[: -(-length // page)][None]
    return table, torch.zeros(length, dtype=torch.int64)


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def fill(rows: torch.Tensor, table: torch.Tensor, pages: int = 40, page: int = PAGE):
    pool = poisoned(pages, page, *rows.shape[1:])
    positions = torch.arange(len(rows))
    write_pages(rows, pool, table, torch.zeros(len(rows), dtype=torch.int64), positions)
    return pool


@pytest.mark.parametrize("length", [1, 3, 4, 5, 63])
def test_dense_attention_equals_torch(length: int) -> None:
    q, k, v = (torch.randn(length, h, WIDTH) for h in (HEADS, KV_HEADS, KV_HEADS))
    gate = torch.randn(length, HEADS, WIDTH)
    table, sequence = paged(length)
    found = paged_attention(
        q, fill(k, table), fill(v, table), table, sequence, torch.arange(length), gate_THD=gate
    )
    expected = scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(found, expected * torch.sigmoid(gate), rtol=0, atol=1e-5)


def test_selected_tokens_alone_are_seen() -> None:
    length = 17
    q, k, v = (torch.randn(length, h, WIDTH) for h in (HEADS, KV_HEADS, KV_HEADS))
    table, sequence = paged(length)
    selected = torch.full((length, 6), -1)
    mask = torch.zeros(length, length, dtype=torch.bool)
    for t in range(length):
        chosen = torch.randperm(t + 1)[:5].sort().values
        selected[t, : len(chosen)] = chosen
        mask[t, chosen] = True
    found = paged_attention(
        q,
        fill(k, table),
        fill(v, table),
        table,
        sequence,
        torch.arange(length),
        selected_TS=selected,
    )
    expected = scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k, v)), attn_mask=mask, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_selecting_everything_equals_dense_bit_by_bit() -> None:
    length = 21
    q, k, v = (torch.randn(length, h, WIDTH) for h in (HEADS, KV_HEADS, KV_HEADS))
    table, sequence = paged(length)
    positions = torch.arange(length)
    everything = torch.where(positions <= positions[:, None], positions, -1)
    args = (q, fill(k, table), fill(v, table), table, sequence, positions)
    assert torch.equal(paged_attention(*args), paged_attention(*args, selected_TS=everything))


def test_writes_go_to_the_sequence_they_belong_to() -> None:
    rows = torch.randn(3, KV_HEADS, WIDTH)
    pool = poisoned(5, PAGE, KV_HEADS, WIDTH)
    table = torch.tensor([[4, 1], [0, -1]])
    write_pages(rows, pool, table, torch.tensor([0, 1, 0]), torch.tensor([5, 3, 2]))
    assert torch.equal(pool[1, 1], rows[0])
    assert torch.equal(pool[0, 3], rows[1])
    assert torch.equal(pool[4, 2], rows[2])
    assert pool.isnan().sum() == (5 * PAGE - 3) * KV_HEADS * WIDTH


RATIO, BUDGET, INDEX_HEADS, INDEX_WIDTH, INDEX_PAGE = 4, 8, 3, 16, 2


def select(q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """select_tokens with `keys` [blocks, D] stored in pages."""
    table, _ = paged(len(keys), INDEX_PAGE)
    pool = fill(keys, table, page=INDEX_PAGE)
    sequence = torch.zeros(len(positions), dtype=torch.int64)
    return select_tokens(q, pool, table, sequence, positions, ratio=RATIO, budget=BUDGET)


def brute_force(q: torch.Tensor, keys: torch.Tensor, position: int) -> list[int]:
    blocks = (position + 1) // RATIO
    scores = [
        sum(max(0.0, float(q[h].double() @ keys[b].double())) for h in range(len(q)))
        for b in range(blocks)
    ]
    best = sorted(range(blocks), key=lambda b: (-scores[b], b))[: BUDGET // RATIO]
    tokens = [b * RATIO + i for b in sorted(best) for i in range(RATIO)]
    return tokens + list(range(blocks * RATIO, position + 1))


def test_selection_equals_brute_force_at_every_position() -> None:
    length = 50
    q = torch.randn(length, INDEX_HEADS, INDEX_WIDTH)
    keys = torch.randn(length // RATIO, INDEX_WIDTH)
    selected = select(q, keys, torch.arange(length))
    assert selected.shape == (length, BUDGET + RATIO - 1)
    for position in range(length):
        expected = brute_force(q[position], keys, position)
        row = selected[position].tolist()
        assert row == expected + [-1] * (len(row) - len(expected)), position


def test_ties_go_to_the_earlier_block() -> None:
    q = torch.ones(1, INDEX_HEADS, INDEX_WIDTH)
    keys = torch.ones(6, INDEX_WIDTH)
    keys[3] *= 2
    selected = select(q, keys, torch.tensor([23]))
    assert selected[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15, -1, -1, -1]


def test_only_closing_tokens_store_a_block_key() -> None:
    keys = torch.randn(6, INDEX_WIDTH)
    pool = poisoned(4, INDEX_PAGE, INDEX_WIDTH)
    table = torch.tensor([[2, 0]])
    sequence = torch.zeros(6, dtype=torch.int64)
    write_closed_blocks(keys, pool, table, sequence, torch.arange(6, 12), RATIO)
    assert torch.equal(pool[2, 1], keys[1])
    assert torch.equal(pool[0, 0], keys[5])
    assert pool.isnan().sum() == 6 * INDEX_WIDTH


def test_mean_of_blocks_is_taken_in_fp32() -> None:
    keys = torch.randn(9, RATIO, INDEX_WIDTH).bfloat16()
    assert torch.equal(mean_of_blocks(keys), keys.float().mean(1).bfloat16())
