"""Ranks and stages together equal the whole, wherever the layers are cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.checkpoint import CheckpointError
from services.engine.models.base import Shard
from services.engine.runtime.tables_api import TableSource
from tests.models.deepseek_v41.conftest import GOLDENS, load, prompt
from tests.models.runner import Runner
from tests.models.test_sharding import ThreadCollectives, _Shared

TOLERANCE = 5e-5  # absolute, fp32: sums over ranks are formed in another order
LAYERS = 10
IDS = prompt(60, seed=41)


@pytest.fixture(scope="module")
def whole(exact: Any, tables: TableSource) -> torch.Tensor:
    return Runner([exact], tables).run(IDS, 60)


def stages_of(folder: Path, *cuts: int, quantised_cache: bool = False) -> list[Any]:
    bounds = pairwise((0, *cuts, LAYERS))
    return [
        load(folder, Shard(first_layer=a, last_layer=b), quantised_cache=quantised_cache)
        for a, b in bounds
    ]


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 7, 9])
def test_two_stages_equal_one_bit_for_bit(
    tables: TableSource, whole: torch.Tensor, cut: int
) -> None:
    """Cuts beside and inside groups of layers that share a cache, a selection, or candidates."""
    assert torch.equal(Runner(stages_of(GOLDENS, cut), tables).run(IDS, 13), whole)


def test_a_stage_in_the_middle_passes_on_what_it_does_not_make(
    tables: TableSource, whole: torch.Tensor
) -> None:
    """Layer 7 alone reads entries and a selection of layer 6; so do layers behind it."""
    assert torch.equal(Runner(stages_of(GOLDENS, 7, 8), tables).run(IDS, 13), whole)


def test_stages_round_a_shared_cache_alike(quantised: Any, tables: TableSource) -> None:
    stages = stages_of(GOLDENS, 3, 9, quantised_cache=True)
    expected = Runner([quantised], tables).run(IDS, 60)
    assert torch.equal(Runner(stages, tables).run(IDS, 13), expected)


def test_a_stage_keeps_the_caches_that_its_layers_read() -> None:
    first, second = stages_of(GOLDENS, 3)
    names = [{t.name for g in s.groups for t in g.tensors} for s in (first, second)]
    assert "layers.2.entries" in names[0] & names[1]
    assert "layers.4.entries" in names[1] - names[0]
    assert [n.table for n in second.ngrams] == ["deepseek_v41.layers.4.engram"]


def test_two_ranks_equal_one(tables: TableSource, whole: torch.Tensor) -> None:
    shared = _Shared(2)

    def run(rank: int) -> torch.Tensor:
        collectives = ThreadCollectives(rank, 2, shared)
        model = load(shard=Shard(rank=rank, world=2), collectives=collectives)
        return Runner([model], tables).run(IDS, 17)

    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(run, range(2)))
    assert torch.equal(*ranks)
    torch.testing.assert_close(ranks[0], whole, rtol=0, atol=TOLERANCE)


def test_uneven_ranks_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"does not divide over 3"):
        load(shard=Shard(world=3))
