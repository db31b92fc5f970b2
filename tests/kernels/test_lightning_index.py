"""Scores and selection of compressed entries against a scalar search."""

from __future__ import annotations

import pytest
import torch

from kernels.lightning_index import Candidates, select_entries

HEADS, WIDTH, PER_PAGE = 5, 16, 8


def paged(keys_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool and table of one sequence at random pages; entries nobody wrote are NaN."""
    count = -(-len(keys_ND) // PER_PAGE)
    pool = torch.full((count + 2, PER_PAGE, WIDTH), torch.nan)
    pages = torch.randperm(count + 2)[:count]
    flat = pool.flatten(0, 1)
    for number, key in enumerate(keys_ND):
        flat[int(pages[number // PER_PAGE]) * PER_PAGE + number % PER_PAGE] = key
    return pool, pages[None]


def best(
    q_HD: torch.Tensor, weights_H: torch.Tensor, keys_ND: torch.Tensor, allowed: set[int], top: int
) -> list[int]:
    """In fp64, by sorting (score, number)."""
    scores = (weights_H.double() @ (q_HD.double() @ keys_ND.double().T).clamp_min(0)).tolist()
    return sorted(sorted(allowed, key=lambda g: (-scores[g], g))[:top])


def select(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    visible: torch.Tensor,
    top: int,
    candidates: Candidates | None = None,
) -> list[list[int]]:
    """Selections, with what stands behind them checked to be -1."""
    sequence = torch.zeros(len(q), dtype=torch.int64)
    found = select_entries(
        q, weights, *paged(keys), sequence, visible, top_k=top, candidates=candidates
    )
    assert found.shape == (len(q), top)
    rows = [[g for g in row if g >= 0] for row in found.tolist()]
    assert all(
        row[len(kept) :] == [-1] * (top - len(kept))
        for row, kept in zip(found.tolist(), rows, strict=True)
    )
    return rows


@pytest.mark.parametrize("top", [1, 6, 40])
def test_selection_equals_a_scalar_search(top: int) -> None:
    """Weights of both signs; from nothing visible to everything."""
    tokens, entries = 70, 69
    q, weights = torch.randn(tokens, HEADS, WIDTH), torch.randn(tokens, HEADS)
    keys, visible = torch.randn(entries, WIDTH), torch.arange(tokens)
    found = select(q, weights, keys, visible, top)
    for t in range(tokens):
        assert found[t] == best(q[t], weights[t], keys, set(range(t)), top)


def test_the_lower_entry_wins_among_equals() -> None:
    """Keys in fours of the same, and keys that no head likes, whose scores are all 0."""
    keys = torch.randn(10, WIDTH).repeat_interleave(4, 0)
    q = torch.randn(9, HEADS, WIDTH)
    weights, visible = torch.rand(9, HEADS), torch.full((9,), 40)
    found = select(q, weights, keys, visible, 6)
    for t in range(9):
        assert found[t] == best(q[t], weights[t], keys, set(range(40)), 6)
    silent = select(q.abs(), weights, -keys.abs(), visible, 6)
    assert silent == [[0, 1, 2, 3, 4, 5]] * 9


def test_candidates_limit_the_selection() -> None:
    keys, q = torch.randn(45, WIDTH), torch.randn(3, HEADS, WIDTH)
    weights, visible = torch.randn(3, HEADS), torch.tensor([45, 30, 3])
    blocks = torch.tensor([[0, 5, 3], [7, 1, -1], [0, -1, -1]])
    found = select(q, weights, keys, visible, 5, Candidates(blocks, size=4))
    for t in range(3):
        allowed = {g for b in blocks[t].tolist() if b >= 0 for g in range(4 * b, 4 * b + 4)}
        allowed &= set(range(int(visible[t])))
        assert found[t] == best(q[t], weights[t], keys, allowed, 5)


@pytest.mark.parametrize("position", [131_071, 131_075, 524_287])
def test_selection_at_long_positions(position: int) -> None:
    """One entry for four tokens: the best ones lie at the far end and at the edge of a tile."""
    visible = (position + 1) // 4
    table = torch.zeros(1, -(-visible // PER_PAGE), dtype=torch.int64)  # page 0: keys of zeros
    pool = torch.zeros(4, PER_PAGE, WIDTH)
    pool[1:] = torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    last, edge = (visible - 1) // PER_PAGE, 8192 // PER_PAGE
    table[0, last], table[0, edge], table[0, edge - 1] = 3, 2, 1
    q, weights = torch.ones(1, HEADS, WIDTH), torch.ones(1, HEADS)
    found = select_entries(
        q, weights, pool, table, torch.tensor([0]), torch.tensor([visible]), top_k=32
    )[0].tolist()
    end = list(range(last * PER_PAGE, visible))
    wanted = {*end, *range(8184, 8200)}
    wanted |= set(range(32 - len(wanted)))  # then the lowest of those whose score is 0
    assert found == sorted(wanted)


def test_company_changes_no_choice() -> None:
    q, weights = torch.randn(33, HEADS, WIDTH), torch.randn(33, HEADS)
    keys, visible = torch.randn(60, WIDTH), torch.randint(0, 61, (33,))
    pool, table = paged(keys)
    sequence = torch.zeros(33, dtype=torch.int64)
    whole = select_entries(q, weights, pool, table, sequence, visible, top_k=7)
    for t in range(33):
        now = slice(t, t + 1)
        one = select_entries(
            q[now], weights[now], pool, table, sequence[now], visible[now], top_k=7
        )
        assert torch.equal(one, whole[now])
