"""Every stored tensor against an independent decoder; parts of matrices; mixed formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from kernels.quant_linear import Fp8BlockMatrix, PlainMatrix, dequantize
from services.common.checkpoint import Checkpoint, CheckpointError
from services.engine.checkpoints.formats import Fp8BlockFormat, formats_of
from services.engine.checkpoints.loader import even_part, make_readers
from services.engine.checkpoints.tensors import Slice, TensorReader
from services.engine.models.base import Shard
from tests.models.tiny import save_tiny

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
NANO = ROOT / "services/engine/checkpoints/nano_models/nano-qwen3.8-flash-next"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("fp8"), "qwen4_exp", "fp8").folder


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        merged |= load_file(path)
    return merged


def decoded(codes_NK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """transformers' fp32 values; it takes whole blocks of 128 only, so cut ones are filled up."""
    n, k = codes_NK.shape
    whole = torch.zeros(128 * scale.shape[0], 128 * scale.shape[1], dtype=codes_NK.dtype)
    whole[:n, :k] = codes_NK
    return Fp8Dequantize(None)._dequantize_one(whole, scale, torch.float32)[:n, :k]


@pytest.fixture(scope="module")
def folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    dense = save_tiny(tmp_path_factory.mktemp("dense"), "qwen3_5", "fp8").folder
    return {"experts": folder, "dense": dense, "nano": NANO}


@pytest.mark.parametrize("which", ["experts", "dense", "nano"])
def test_every_matrix_equals_the_independent_decoder(which: str, folders: dict[str, Path]) -> None:
    folder = folders[which]
    stored = all_tensors(folder)
    blocks = 0
    with Checkpoint.open(folder) as checkpoint:
        _, reader = make_readers(checkpoint, CPU, Shard())
        for name, tensor in stored.items():
            if not name.endswith(".weight") or tensor.dim() != 2 or ".shard_" in name:
                continue
            matrix = reader.matrix(name.removesuffix(".weight"), tuple(tensor.shape))
            scale = stored.get(f"{name}_scale_inv")
            expected = tensor.float()
            if scale is not None:
                blocks += 1
                assert isinstance(matrix, Fp8BlockMatrix)
                expected = decoded(tensor, scale)
            assert torch.equal(dequantize(matrix), expected), name
    assert blocks >= (4 * 5 if which == "dense" else 4 * 8 * 3)


def test_expert_stacks_hold_gate_above_up(folder: Path) -> None:
    stored = all_tensors(folder)
    base = "model.language_model.layers.2.mlp.experts"
    with Checkpoint.open(folder) as checkpoint:
        _, reader = make_readers(checkpoint, CPU, Shard(rank=1, world=2))
        experts = reader.at(base).experts(8, 128, 128)
    assert (experts.first_expert, experts.count) == (4, 4)
    for local in range(4):
        whole = dequantize(experts.gate_up.expert(local))
        for row, projection in ((0, "gate_proj"), (128, "up_proj")):
            name = f"{base}.{local + 4}.{projection}.weight"
            values = stored[name].float() * stored[f"{name}_scale_inv"].float()
            assert torch.equal(whole[row : row + 128], values)


def test_parts_of_tensors_are_cut_in_every_dimension(folder: Path) -> None:
    name = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
    whole = all_tensors(folder)[name]
    with Checkpoint.open(folder) as checkpoint:
        tensors = TensorReader(checkpoint)
        rows = tensors.read(name, Slice(0, ((0, 32), (64, 96), (310, 320))))
        columns = tensors.read(name, Slice(1, ((120, 128), (0, 3))))
    assert torch.equal(rows, torch.cat([whole[:32], whole[64:96], whole[310:]]))
    assert torch.equal(columns, torch.cat([whole[:, 120:], whole[:, :3]], dim=1))


def test_even_parts_take_a_share_of_every_segment() -> None:
    part = even_part(Shard(rank=1, world=2), 0, 64, 64, 192, what="qkv")
    assert part == Slice(0, ((32, 64), (96, 128), (224, 320)))
    assert even_part(Shard(), 0, 64, what="x") is None


def test_block_size_comes_from_the_config() -> None:
    config = {"quantization_config": {"weight_block_size": [32, 64]}}
    assert Fp8BlockFormat(32, 64) in formats_of(config)
    assert Fp8BlockFormat(128, 128) in formats_of({})


@pytest.mark.parametrize("size", [[128], "128", [0, 128], [128, 128, 128]])
def test_bad_block_size_is_refused(size: object) -> None:
    with pytest.raises(CheckpointError, match="weight_block_size"):
        formats_of({"quantization_config": {"weight_block_size": size}})


def test_stacks_of_two_formats_are_refused() -> None:
    plain = PlainMatrix(torch.zeros(128, 128))
    fp8 = Fp8BlockMatrix(torch.zeros(128, 128, dtype=torch.uint8), torch.ones(1, 1))
    with pytest.raises(TypeError, match="others"):
        Fp8BlockFormat().stack([fp8, plain], 1, "x")
