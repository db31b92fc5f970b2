"""Rank r of 2 and stage s of 2 together equal the whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.common.checkpoint import CheckpointError
from services.engine.checkpoints.nano.deepseek_v4 import build_nano
from services.engine.models.base import Shard
from tests.models.deepseek_v4.conftest import GetNano, Model, load, prompt
from tests.models.runner import Runner
from tests.models.test_sharding import ThreadCollectives, _Shared

TOLERANCE = 5e-5  # absolute, fp32: sums over ranks are formed in another order
# Sizes whose halves are whole quantisation blocks.
HALVES = {"o_lora_rank": 128, "moe_intermediate_size": 256, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def even_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("even")
    return build_nano(folder, "preview", **HALVES)


def run_ranks(folder: Path, ids: list[int], chunk: int) -> list[torch.Tensor]:
    shared = _Shared(2)

    def run(rank: int) -> torch.Tensor:
        model = load(folder, Shard(rank=rank, world=2), ThreadCollectives(rank, 2, shared))
        return Runner([model]).run(ids, chunk)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


def test_two_ranks_equal_one(even_folder: Path) -> None:
    ids = prompt(140, seed=41)
    whole = Runner([load(even_folder)]).run(ids, 140)
    ranks = run_ranks(even_folder, ids, 70)
    assert torch.equal(*ranks)
    torch.testing.assert_close(ranks[0], whole, rtol=0, atol=TOLERANCE)


def test_ranks_hold_half_of_what_is_split(even_folder: Path) -> None:
    whole = load(even_folder).weight_bytes
    halves = [load(even_folder, Shard(rank=r, world=2)).weight_bytes for r in range(2)]
    assert halves[0] == halves[1]
    assert whole < sum(halves) < 1.4 * whole


def test_ranks_that_cut_a_block_are_refused_by_name(get_nano: GetNano) -> None:
    with pytest.raises(CheckpointError, match="cuts a quantisation block of 128") as caught:
        load(get_nano("0731"), Shard(rank=0, world=2))
    assert caught.value.tensor


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_two_stages_equal_one_at_every_kind_of_cut(
    get_nano: GetNano, nano: Model, cut: int
) -> None:
    folder = get_nano("0731")
    ids = prompt(140, seed=43)
    stages = [load(folder, Shard(last_layer=cut)), load(folder, Shard(first_layer=cut))]
    assert sum(s.weight_bytes for s in stages) == nano.weight_bytes
    assert [s.weights.parts.draft is not None for s in stages] == [False, True]
    assert torch.equal(Runner(stages).run(ids, 70), Runner([nano]).run(ids, 140))


def test_a_stage_has_only_the_groups_of_its_layers(get_nano: GetNano) -> None:
    folder = get_nano("0731")
    names = [{g.name for g in load(folder, Shard(0, 1, a, b)).groups} for a, b in ((0, 2), (2, 3))]
    assert names == [{"window"}, {"window", "csa", "index", "state"}]
