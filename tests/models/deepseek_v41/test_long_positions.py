"""Across position 131,072: windows, selections and pages of a long context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.lightning_index import select_candidates, select_entries
from services.engine.runtime.tables_api import TableSource
from tests.models.deepseek_v41.conftest import prompt
from tests.models.runner import Live, Part, Runner

START = 131_068
NEEDLES = (3, 40_000, 65_535, 65_536, 131_071, 131_072)


@pytest.fixture(scope="module")
def keys() -> tuple[torch.Tensor, torch.Tensor]:
    """A pool whose pages lie in random order, and their table; needles point along the query."""
    generator = torch.Generator().manual_seed(4)
    flat = torch.rand(131_136, 4, generator=generator) * 0.5
    flat[list(NEEDLES)] += 1.0
    order = torch.randperm(2049, generator=generator)
    pool = torch.empty(2049, 64, 4)
    pool[order] = flat.view(2049, 64, 4)
    return pool, order[None]


def test_needles_are_found_at_both_ends_of_a_long_context(
    keys: tuple[torch.Tensor, torch.Tensor],
) -> None:
    q, weights = torch.ones(2, 1, 4), torch.ones(2, 1)
    sequence, visible = torch.zeros(2, dtype=torch.int64), torch.tensor([131_073, 131_072])
    found = select_entries(q, weights, *keys, sequence, visible, top_k=6)
    assert found[0].tolist() == list(NEEDLES)
    assert set(NEEDLES[:5]) < set(found[1].tolist()) and found[1].max() == 131_071


def test_candidate_blocks_of_a_long_context_hold_the_needles_and_the_newest(
    keys: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """The second token does not see the needles at the end, and keeps its newest block anyway."""
    q, weights = torch.ones(2, 1, 4), torch.ones(2, 1)
    at = (torch.zeros(2, dtype=torch.int64), torch.tensor([131_073, 131_065]))
    blocks = select_candidates(q, weights, *keys, *at, size=8, top_blocks=6)
    assert blocks.blocks_TC[0].tolist() == [needle // 8 for needle in NEEDLES]
    fewer = select_candidates(q, weights, *keys, *at, size=8, top_blocks=5)
    assert fewer.blocks_TC[1].tolist() == [0, 5000, 8191, 8192, 16_383]
    limited = select_entries(q, weights, *keys, *at, top_k=4, candidates=fewer)
    assert limited[1].tolist() == list(NEEDLES[:4])


def test_a_chunk_across_131072_equals_its_tokens_one_by_one(
    exact: Any, tables: TableSource
) -> None:
    """On a cache of random rows, since only the arithmetic of positions is in question."""
    ids, generator = prompt(8, seed=3), torch.Generator().manual_seed(6)
    runner = Runner([exact], tables, pages=2 * (START // 64 + 2))
    for tensors in runner.pools[0].values():
        for tensor in tensors.values():
            tensor.copy_(torch.rand(tensor.shape[1:], generator=generator))
    runner.free_pages["window"] = list(range(4200))
    lives = [long_life(runner), None]
    lives[1] = Live(list(lives[0].ids), {n: list(p) for n, p in lives[0].pages.items()})
    whole = runner.step([Part(lives[0], ids)])[0][0]
    rows = [runner.step([Part(lives[1], [token])])[0][0] for token in ids]
    assert whole.isfinite().all() and torch.equal(torch.cat(rows), whole)


def long_life(runner: Runner) -> Live:
    """A sequence of START tokens, an even number, so that no window of two is open."""
    live = Live([5] * START)
    for name, group in runner.groups.items():
        if group.kind != "state":
            count = -(-(START + 8) // group.page_tokens)
            live.pages[name] = [runner.free_pages[name].pop() for _ in range(count)]
    return live
