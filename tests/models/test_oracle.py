"""Logits equal those of `transformers` on the same weights, however a prompt is cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.engine.models.registry import load_model
from tests.models.conftest import CPU, GetTiny, runner_of
from tests.models.runner import Runner
from tests.models.tiny import Family, Layout, prompt, save_tiny

# A prompt for which no block that ties at score 0 lies on the edge of a selection: there the
# oracle's choice is whatever its top-k returns, ours is the lower index.
SEED = 9
TOLERANCE = 1e-4  # absolute, fp32; logits have a standard deviation of 0.26 to 0.46
CASES: list[tuple[Family, Layout]] = [
    ("qwen4_exp", "fp32"),
    ("qwen4_exp", "bf16"),
    ("qwen4_exp", "fp8"),
    ("qwen3_5", "fp32"),
    ("qwen3_5", "bf16"),
    ("qwen3_5", "fp8"),
]


@pytest.mark.parametrize("chunk", [90, 1, 7, 64])
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logits_equal_transformers(
    get_tiny: GetTiny, family: Family, layout: Layout, chunk: int
) -> None:
    tiny = get_tiny(family, layout)
    ids = prompt(90 if chunk > 1 else 61, seed=SEED)
    expected = tiny.logits(ids)
    found = runner_of(tiny.folder).run(ids, chunk)
    assert expected.std() > 0.2
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_5"])
def test_every_mechanism_moves_the_logits(
    get_tiny: GetTiny, family: Family, tmp_path: Path
) -> None:
    """The oracle comparison would notice a mechanism that was left out."""
    tiny = get_tiny(family, "fp32")
    ids = prompt(61, seed=SEED)
    base = runner_of(tiny.folder).run(ids, 61)
    changes = {
        "output_gate_type": "silu" if family == "qwen4_exp" else "sigmoid",
        "rope_parameters": {**tiny.text["rope_parameters"], "rope_theta": 1e4},
    }
    if family == "qwen4_exp":
        changes |= {"indexer_budget": 64, "num_experts_per_tok": 2, "norm_topk_prob": False}
    config = json.loads((tiny.folder / "config.json").read_text())
    for file in tiny.folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    for field, value in changes.items():
        changed = {**config, "text_config": {**config["text_config"], field: value}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        moved = (runner_of(tmp_path).run(ids, 61) - base).abs().max()
        assert moved > 10 * TOLERANCE, field


def test_fused_and_single_expert_spellings_give_the_same_bits(tmp_path: Path) -> None:
    ids = prompt(40, seed=1)
    runs = [
        runner_of(save_tiny(tmp_path / kind, "qwen4_exp", "bf16", experts=kind).folder).run(ids, 40)
        for kind in ("single", "fused")
    ]
    assert torch.equal(*runs)


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_5"])
def test_text_only_prefix_gives_the_same_bits(
    get_tiny: GetTiny, family: Family, tmp_path: Path
) -> None:
    ids = prompt(40, seed=2)
    text_only = save_tiny(tmp_path, family, "fp32", prefix="model", shards=1)
    both = [runner_of(f).run(ids, 40) for f in (text_only.folder, get_tiny(family, "fp32").folder)]
    assert torch.equal(*both)


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_5"])
def test_folder_written_by_save_pretrained_is_served(
    get_tiny: GetTiny, family: Family, tmp_path: Path
) -> None:
    """Names, expert spelling, table shards and config fields as `transformers` writes them."""
    tiny = get_tiny(family, "bf16")
    tiny.oracle.save_pretrained(tmp_path)
    rewrite_table_as_bf16(tmp_path)
    ids = prompt(40, seed=3)
    found = runner_of(tmp_path).run(ids, 13)
    torch.testing.assert_close(found, tiny.logits(ids), rtol=0, atol=TOLERANCE)


def rewrite_table_as_bf16(folder: Path) -> None:
    """The served table types are e4m3 and bf16; the fp32 oracle writes fp32."""
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "ngram_embedding.shard" in name:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, path)


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_5"])
def test_bf16_activations_stay_close_to_fp32(get_tiny: GetTiny, family: Family) -> None:
    tiny = get_tiny(family, "bf16")
    ids = prompt(40, seed=4)
    fp32 = runner_of(tiny.folder).run(ids, 40)
    bf16 = runner_of(tiny.folder, dtype=torch.bfloat16).run(ids, 40)
    assert ((bf16 - fp32).norm() / fp32.norm()) < 0.05


def test_yarn_equals_transformers(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    tiny = save_tiny(tmp_path, "qwen3_5", "fp32", text={"rope_parameters": rope})
    ids = prompt(80, seed=6)
    found = runner_of(tmp_path).run(ids, 80)
    torch.testing.assert_close(found, tiny.logits(ids), rtol=0, atol=TOLERANCE)


def test_logits_come_for_the_asked_rows_only(get_tiny: GetTiny) -> None:
    from dataclasses import replace

    from tests.models.runner import Live, Part

    tiny = get_tiny("qwen3_5", "fp32")
    model = load_model(tiny.folder, device=CPU, compute_dtype=torch.float32)
    whole = Runner([model]).run(prompt(20, seed=7), 20)
    runner = Runner([model])
    batch, _ = runner._batch([Part(Live(), prompt(20, seed=7))])
    rows = torch.tensor([3, 19])
    some = model.forward(replace(batch, logit_rows_N=rows), runner.pools[0])
    assert torch.equal(some, whole[rows])
