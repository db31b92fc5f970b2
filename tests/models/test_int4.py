"""Whole models in W4A16: dense projections of Qwen3.8-27B, routed experts of Flash-Next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernels.quant_linear import Int4Matrix, Matrix
from services.common.checkpoint import Checkpoint, CheckpointError
from services.engine.models.base import Shard
from tests.models.conftest import GetTiny, load, runner_of
from tests.models.int4 import Int4Layout
from tests.models.test_loading import resident, rewrite_tensors, served_bytes
from tests.models.test_sharding import TOLERANCE as RANKS_TOLERANCE
from tests.models.test_sharding import run_ranks
from tests.models.tiny import Family, Layout, prompt, save_tiny

TOLERANCE = 1e-4  # absolute, fp32; logits have a standard deviation of 0.26 to 0.47
SEED = 9  # see test_oracle.py
LAYOUTS: list[Layout] = [
    "ct-sym-g32",
    "ct-sym-g128",
    "ct-asym-g32",
    "ct-asym-g128",
    "awq-g32",
    "awq-g128",
]
every = pytest.mark.parametrize(
    ("family", "layout"), [(f, lay) for f in ("qwen3_5", "qwen4_exp") for lay in LAYOUTS]
)
# Matrices in four bits: 8 layers of 6 or 7; 4 layers of two stacks. With groups of 128 the
# outputs of delta nets, of 192 inputs, are in bf16 among them.
MATRICES = {
    ("qwen3_5", 32): 6 * 6 + 2 * 7,
    ("qwen3_5", 128): 6 * 5 + 2 * 7,
    ("qwen4_exp", 32): 4 * 2,
    ("qwen4_exp", 128): 4 * 2,
}


@every
def test_logits_equal_transformers(get_tiny: GetTiny, family: Family, layout: Layout) -> None:
    tiny = get_tiny(family, layout)
    ids = prompt(90, seed=SEED)
    expected, runner = tiny.logits(ids), runner_of(tiny.folder)
    whole = runner.run(ids, 90)
    assert expected.std() > 0.2
    torch.testing.assert_close(whole, expected, rtol=0, atol=TOLERANCE)
    assert torch.equal(runner.run(ids, 13), whole)


@every
def test_four_bits_stay_four_bits(get_tiny: GetTiny, family: Family, layout: Layout) -> None:
    folder = get_tiny(family, layout).folder
    model = runner_of(folder).stages[0]
    form = Int4Layout.of(layout)
    assert form is not None
    found = [m for m in four_bit_matrices(model) if m.group == form.group]
    assert len(found) == MATRICES[family, form.group]
    assert all((m.zero is not None) == form.asymmetric for m in found)
    assert model.weight_bytes == served_bytes(folder) + growth(folder)
    kept = sum(t.untyped_storage().nbytes() for t in resident(model))
    with Checkpoint.open(folder) as checkpoint:
        assert kept <= 1.05 * checkpoint.total_bytes()


def four_bit_matrices(value: object) -> Iterator[Int4Matrix]:
    """All INT4 matrices of a stage, stacks counted once."""
    if isinstance(value, Int4Matrix):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from four_bit_matrices(item)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, Matrix):
        for field in value.__dataclass_fields__:
            yield from four_bit_matrices(getattr(value, field))


def growth(folder: Path) -> int:
    """Bytes that memory holds beyond the files: zero points are bytes there, shapes are gone."""
    total = 0
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if name.endswith((".weight_zero_point", ".qzeros")):
                total += tensor.nbytes
            elif name.endswith(".weight_shape"):
                total -= tensor.nbytes
    return total


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_5", "ct-asym-g32"), ("qwen3_5", "awq-g32"), ("qwen4_exp", "ct-asym-g128")],
)
def test_two_ranks_equal_one(get_tiny: GetTiny, family: Family, layout: Layout) -> None:
    folder = get_tiny(family, layout).folder
    ids = prompt(30, seed=41)
    ranks = run_ranks(folder, ids, 17, world=2)
    assert torch.equal(*ranks)
    whole = runner_of(folder).run(ids, 30)
    torch.testing.assert_close(ranks[0], whole, rtol=0, atol=RANKS_TOLERANCE)


def test_ranks_that_cut_a_group_are_refused(get_tiny: GetTiny) -> None:
    folder = get_tiny("qwen3_5", "awq-g128").folder
    with pytest.raises(CheckpointError, match=r"0:192 of 384 .* block of 128") as caught:
        load(folder, Shard(world=2))
    assert caught.value.tensor == "model.language_model.layers.3.self_attn.o_proj.qweight"


@pytest.mark.parametrize("layout", ["ct-asym-g128", "awq-g32"])
def test_bf16_activations_stay_close_to_fp32(get_tiny: GetTiny, layout: Layout) -> None:
    folder = get_tiny("qwen3_5", layout).folder
    ids = prompt(40, seed=4)
    fp32 = runner_of(folder).run(ids, 40)
    bf16 = runner_of(folder, dtype=torch.bfloat16).run(ids, 40)
    assert ((bf16 - fp32).norm() / fp32.norm()) < 0.05


@pytest.mark.parametrize(
    ("family", "layout", "name"),
    [
        ("qwen3_5", "ct-asym-g32", "layers.1.mlp.up_proj.weight_zero_point"),
        ("qwen3_5", "awq-g32", "layers.3.self_attn.o_proj.qzeros"),
        ("qwen4_exp", "ct-sym-g128", "layers.2.mlp.experts.5.down_proj.weight_scale"),
    ],
)
def test_missing_part_is_refused_by_name(
    family: Family, layout: Layout, name: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, family, layout).folder
    full = f"model.language_model.{name}"
    rewrite_tensors(folder, lambda tensors: tensors.pop(full))
    with pytest.raises(CheckpointError, match="missing tensor") as caught:
        load(folder)
    assert caught.value.tensor == full


def test_a_surplus_part_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3_5", "ct-sym-g32").folder
    name = "model.language_model.layers.1.mlp.up_proj.input_scale"
    rewrite_tensors(folder, lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(CheckpointError, match="surplus tensor") as caught:
        load(folder)
    assert caught.value.tensor == name
