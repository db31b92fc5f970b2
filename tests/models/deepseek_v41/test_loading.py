"""Damaged checkpoints and configs are refused by the name of the tensor or field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.checkpoint import CheckpointError
from services.engine.checkpoints.nano.deepseek_v41 import build_nano
from tests.models.deepseek_v41.conftest import load


@pytest.fixture(scope="module")
def tensors(nano: Path) -> dict[str, torch.Tensor]:
    return load_file(nano / "model.safetensors")


@pytest.fixture
def damaged(nano: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(nano, tmp_path / "damaged"))


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_nano_checkpoint_holds_every_part(nano: Path, tensors: dict[str, torch.Tensor]) -> None:
    model = load(nano)
    assert model.vision is not None and len(model.weights.parts.draft.stages) == 3
    assert [n.table for n in model.ngrams] == [f"deepseek_v41.layers.{i}.engram" for i in (1, 4)]
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    stored = sum(sizes.values())
    tables = sum(size for name, size in sizes.items() if ".engram.embed." in name)
    assert model.weight_bytes == stored - tables


def test_builder_repeats_itself(nano: Path, tmp_path: Path) -> None:
    again = build_nano(tmp_path)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (again / name).read_bytes() == (nano / name).read_bytes()


MISSING = (
    "layers.4.attn.compressor.wgate.weight",
    "layers.8.attn.indexer.wq_b.scale",
    "layers.1.engram.wkv.scale",
    "layers.4.engram.embed.scale",
    "layers.3.ffn.gate.bias_vl",
    "layers.0.ffn.experts.5.w2.weight",
    "mtp.1.attn.attn_sink",
    "mtp.2.markov_head.embed.weight",
    "aligner.w2.bias",
    "image_newline",
)


@pytest.mark.parametrize("name", MISSING)
def test_missing_tensors_are_named(
    damaged: Path, tensors: dict[str, torch.Tensor], name: str
) -> None:
    rewrite(damaged, {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(CheckpointError) as failure:
        load(damaged)
    assert name in str(failure.value)


SURPLUS = (
    "layers.6.attn.compressor.wgate.weight",  # ratio 1 has no gate
    "layers.3.attn.indexer.wq_b.weight",  # no index source
    "layers.0.engram.wkv.weight",
    "mtp.3.norm.weight",  # would be a fourth stage
)


@pytest.mark.parametrize("name", SURPLUS)
def test_surplus_tensors_are_named(
    damaged: Path, tensors: dict[str, torch.Tensor], name: str
) -> None:
    rewrite(damaged, {**tensors, name: torch.zeros(64, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError) as failure:
        load(damaged)
    assert name.rsplit(".", 2)[0] in str(failure.value)


@pytest.mark.parametrize(
    "name",
    ["layers.2.attn.indexer.wk.weight", "layers.4.engram.embed.weight", "layers.9.hc_ffn_fn"],
)
def test_misshaped_tensors_are_named(
    damaged: Path, tensors: dict[str, torch.Tensor], name: str
) -> None:
    rewrite(damaged, {**tensors, name: tensors[name].t().contiguous()})
    with pytest.raises(CheckpointError) as failure:
        load(damaged)
    assert name in str(failure.value)


def test_a_nan_code_is_named(damaged: Path, tensors: dict[str, torch.Tensor]) -> None:
    name = "layers.5.attn.wq_a.weight"
    codes = tensors[name].view(torch.uint8).clone()
    codes[3, 7] = 0x7F
    rewrite(damaged, {**tensors, name: codes.view(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=r"layers\.5\.attn\.wq_a\.weight"):
        load(damaged)


def test_a_file_cut_short_is_named(damaged: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"truncated file.*model\.safetensors") as failure:
        load(damaged)
    assert failure.value.tensor in tensors


FIELDS = (
    ("compress_ratios", [0, 0, 4, 2, 2, 2, 1, 1, 1, 1]),
    ("kv_source_layer_ids", [3, 4, 6]),
    ("kv_source_layer_ids", [2, 4]),
    ("index_source_layer_ids", [2, 6, 8]),
    ("candidate_source_layer_id", 4),
    ("engram_layer_ids", [1, 10]),
    ("o_groups", 3),
    ("tie_word_embeddings", True),
    ("dspark_target_layer_ids", [10]),
    ("scoring_func", "softmax"),
)


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_fields_out_of_range_are_named(damaged: Path, field: str, value: Any) -> None:
    path = damaged / "config.json"
    config = json.loads(path.read_text())
    config["text_config"][field] = value
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=field):
        load(damaged)


def test_another_tokenizer_is_refused(damaged: Path) -> None:
    """Engram rows would be those of other tokens."""
    path = damaged / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["engram_compressed_vocab_size"] += 1
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="distinct normalised tokens"):
        load(damaged)
