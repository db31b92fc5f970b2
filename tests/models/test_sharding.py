"""Rank r of 2 and stage s of 2 together equal the whole."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from services.common.checkpoint import CheckpointError
from services.engine.models.base import Shard
from tests.models.conftest import GetTiny, load, runner_of, tables_of
from tests.models.runner import Runner
from tests.models.tiny import Family, Layout, prompt, save_tiny

# Head counts that four ranks can share; two key heads, so pairs of ranks share one.
FOUR_WAYS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_attention_heads": 8}
TOLERANCE = 2e-5  # absolute, fp32: sums over ranks are formed in another order


class ThreadCollectives:
    """Sums and concatenations over threads that call in step. One object per rank."""

    def __init__(self, rank: int, world: int, shared: _Shared) -> None:
        self._rank = rank
        self._world = world
        self._shared = shared

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(x)
        return torch.stack(parts).sum(0)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=dim)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._shared.slots[self._rank] = x.clone()
        self._shared.barrier.wait(timeout=30)
        parts = [self._shared.slots[r] for r in range(self._world)]
        self._shared.barrier.wait(timeout=30)
        return parts


class _Shared:
    def __init__(self, world: int) -> None:
        self.slots: dict[int, torch.Tensor] = {}
        self.barrier = threading.Barrier(world)


def run_ranks(tiny_folder, ids: list[int], chunk: int, world: int) -> list[torch.Tensor]:
    shared = _Shared(world)

    def run(rank: int) -> torch.Tensor:
        collectives = ThreadCollectives(rank, world, shared)
        model = load(tiny_folder, Shard(rank=rank, world=world), collectives)
        return Runner([model], tables_of(tiny_folder)).run(ids, chunk)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, range(world)))


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen4_exp", "fp8"), ("qwen4_exp", "fp32"), ("qwen3_5", "bf16")]
)
def test_two_ranks_equal_one(get_tiny: GetTiny, family: Family, layout: Layout) -> None:
    folder = get_tiny(family, layout).folder
    ids = prompt(50, seed=41)
    whole = runner_of(folder).run(ids, 17)
    ranks = run_ranks(folder, ids, 17, world=2)
    assert torch.equal(*ranks)
    torch.testing.assert_close(ranks[0], whole, rtol=0, atol=TOLERANCE)


def test_more_ranks_than_key_heads_share_them(tmp_path) -> None:
    folder = save_tiny(tmp_path, "qwen3_5", "bf16", text=FOUR_WAYS).folder
    ids = prompt(40, seed=42)
    whole = runner_of(folder).run(ids, 40)
    for logits in run_ranks(folder, ids, 40, world=4):
        torch.testing.assert_close(logits, whole, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_two_stages_equal_one_at_every_cut(get_tiny: GetTiny, cut: int) -> None:
    folder = get_tiny("qwen4_exp", "fp8").folder
    ids = prompt(50, seed=43)
    stages = [load(folder, Shard(last_layer=cut)), load(folder, Shard(first_layer=cut))]
    assert [bool(s.ngrams) for s in stages] == [cut > 1, cut <= 1]
    assert [s.weights.parts.draft is not None for s in stages] == [False, True]
    whole = load(folder)
    assert sum(s.weight_bytes for s in stages) == whole.weight_bytes
    found = Runner(stages, tables_of(folder)).run(ids, 9)
    assert torch.equal(found, Runner([whole], tables_of(folder)).run(ids, 9))


def test_three_stages_equal_one_for_the_dense_family(get_tiny: GetTiny) -> None:
    folder = get_tiny("qwen3_5", "bf16").folder
    shards = (Shard(last_layer=2), Shard(first_layer=2, last_layer=5), Shard(first_layer=5))
    ids = prompt(45, seed=44)
    found = Runner([load(folder, s) for s in shards]).run(ids, 11)
    assert torch.equal(found, runner_of(folder).run(ids, 45))


def test_ranks_hold_their_share_of_the_experts(get_tiny: GetTiny) -> None:
    folder = get_tiny("qwen4_exp", "fp8").folder
    whole = load(folder).weight_bytes
    halves = [load(folder, Shard(rank=r, world=2)).weight_bytes for r in range(2)]
    assert halves[0] == halves[1]
    assert whole < sum(halves) < 1.5 * whole


def test_layers_beyond_the_model_are_refused(get_tiny: GetTiny) -> None:
    with pytest.raises(CheckpointError, match=r"layers 0\.\.9 asked for, the model has 0\.\.4"):
        load(get_tiny("qwen4_exp", "fp8").folder, Shard(last_layer=9))


def test_uneven_ranks_are_refused_by_name(get_tiny: GetTiny) -> None:
    with pytest.raises(CheckpointError, match=r"does not divide over 3"):
        load(get_tiny("qwen4_exp", "fp8").folder, Shard(world=3))


def test_a_cut_through_a_quantisation_block_is_refused(tmp_path) -> None:
    import json

    from safetensors.torch import load_file

    from tests.models.tiny import quantise_blocks, write_folder

    tiny = save_tiny(tmp_path, "qwen3_5", "bf16", text=FOUR_WAYS, shards=1)
    tensors = load_file(next(tmp_path.glob("*.safetensors")))
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    codes, scale = quantise_blocks(tensors[name].float())
    tensors |= {name: codes, f"{name}_scale_inv": scale}
    write_folder(tmp_path, json.loads((tmp_path / "config.json").read_text()), tensors, 1)
    assert load(tmp_path, Shard(world=2)).weight_bytes < load(tiny.folder).weight_bytes
    with pytest.raises(CheckpointError, match="cuts a quantisation block of 128"):
        load(tmp_path, Shard(world=4))
