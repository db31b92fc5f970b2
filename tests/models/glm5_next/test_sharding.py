"""Rank r of 2 and stage s of 2 together equal the whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.common.checkpoint import CheckpointError
from services.engine.checkpoints.nano.glm import Layout, build_nano
from services.engine.models.base import Shard
from tests.models.glm5_next.conftest import GetNano, Model, load, prompt
from tests.models.runner import Runner
from tests.models.test_sharding import ThreadCollectives, _Shared

TOLERANCE = 5e-5  # absolute, fp32: sums over ranks are formed in another order
# Sizes whose halves are whole quantisation blocks.
HALVES = {"moe_intermediate_size": 256, "v_head_dim": 64, "qk_nope_head_dim": 64}


@pytest.fixture(scope="module")
def even_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Path]:
    folder = tmp_path_factory.mktemp("even")
    layouts: tuple[Layout, ...] = ("fp8", "awq")
    return {layout: build_nano(folder / layout, layout, **HALVES) for layout in layouts}


def run_ranks(folder: Path, ids: list[int], chunk: int) -> list[torch.Tensor]:
    shared = _Shared(2)

    def run(rank: int) -> torch.Tensor:
        model = load(folder, Shard(rank=rank, world=2), ThreadCollectives(rank, 2, shared))
        return Runner([model]).run(ids, chunk)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


@pytest.mark.parametrize("layout", ["fp8", "awq"])
def test_two_ranks_equal_one(even_folders: dict[Layout, Path], layout: Layout) -> None:
    folder, ids = even_folders[layout], prompt(60, seed=41)
    whole = Runner([load(folder)]).run(ids, 60)
    ranks = run_ranks(folder, ids, 30)
    assert torch.equal(*ranks)
    torch.testing.assert_close(ranks[0], whole, rtol=0, atol=TOLERANCE)


def test_ranks_hold_half_of_what_is_split(even_folders: dict[Layout, Path]) -> None:
    whole = load(even_folders["awq"])
    halves = [load(even_folders["awq"], Shard(rank=r, world=2)) for r in range(2)]
    assert halves[0].weight_bytes == halves[1].weight_bytes
    assert whole.weight_bytes < 2 * halves[0].weight_bytes < 1.5 * whole.weight_bytes
    split = {t.name: t.shape for g in halves[0].groups for t in g.tensors}
    assert split["layers.0.delta"] == (2, 32, 32) and split["layers.0.conv"] == (3, 192)
    assert split["layers.1.latent"] == (128,) and split["layers.1.index_tail"] == (3, 256)


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_two_stages_equal_one_at_every_kind_of_cut(
    get_nano: GetNano, nano: Model, cut: int
) -> None:
    folder, ids = get_nano("fp8"), prompt(60, seed=43)
    stages = [load(folder, Shard(last_layer=cut)), load(folder, Shard(first_layer=cut))]
    assert sum(s.weight_bytes for s in stages) == nano.weight_bytes
    assert [s.weights.parts.draft is not None for s in stages] == [False, True]
    assert [s.vision is not None for s in stages] == [True, False]
    assert torch.equal(Runner(stages).run(ids, 17), Runner([nano]).run(ids, 60))


def test_a_stage_has_only_the_groups_of_its_layers(get_nano: GetNano) -> None:
    shards = (Shard(last_layer=1), Shard(first_layer=1, last_layer=2))
    names = [[g.name for g in load(get_nano("fp8"), s).groups] for s in shards]
    assert names == [["state"], ["kv", "index", "state"]]


def test_ranks_that_cut_a_block_are_refused_by_name(get_nano: GetNano) -> None:
    with pytest.raises(CheckpointError, match="cuts a quantisation block of 128") as caught:
        load(get_nano("fp8"), Shard(rank=0, world=2))
    assert caught.value.tensor
