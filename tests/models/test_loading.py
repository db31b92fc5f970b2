"""What a model folder must hold, and what stays in memory after a load."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.checkpoint import Checkpoint, CheckpointError
from services.engine.layers.rope import RotaryFrequencies
from services.engine.models.registry import family_of
from tests.models.conftest import GetTiny, load, runner_of
from tests.models.tiny import Family, Layout, prompt, save_tiny

ROOT = Path(__file__).parents[2]
NANO = ROOT / "services/engine/checkpoints/nano_models/nano-qwen3.8-flash-next"
TEXT = "model.language_model."
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def copy(get_tiny: GetTiny, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny folder with its tensors or its config changed."""

    def make(
        family: Family,
        layout: Layout,
        tensors: Callable[[Tensors], Any] | None = None,
        config: Callable[[dict[str, Any]], Any] | None = None,
    ) -> Path:
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(get_tiny(family, layout).folder, folder)
        if tensors is not None:
            rewrite_tensors(folder, tensors)
        if config is not None:
            values = json.loads((folder / "config.json").read_text())
            config(values)
            (folder / "config.json").write_text(json.dumps(values))
        return folder

    return make


def rewrite_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    merged: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        merged |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(merged)
    save_file({n: t.contiguous() for n, t in merged.items()}, folder / "model.safetensors")


def resident(value: object) -> Iterator[torch.Tensor]:
    """All tensors that a stage keeps, each storage once."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            if item.untyped_storage().data_ptr() not in seen:
                seen.add(item.untyped_storage().data_ptr())
                yield item
        elif isinstance(item, tuple | list):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif is_dataclass(item):
            stack.extend(getattr(item, f.name) for f in fields(item))


def rotary_tensors(value: object) -> Iterator[torch.Tensor]:
    """Frequencies and their axes, which are made from the config."""
    if isinstance(value, RotaryFrequencies):
        yield from resident(value)
    elif is_dataclass(value):
        for field in fields(value):
            yield from rotary_tensors(getattr(value, field.name))


def served_bytes(folder: Path) -> int:
    """Bytes of the checkpoint without the table and its constants."""
    with Checkpoint.open(folder) as checkpoint:
        names = [n for n in checkpoint.names() if "ple_embedding" not in n]
        return sum(checkpoint.info(n).nbytes for n in names)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen4_exp", "bf16"), ("qwen4_exp", "fp8"), ("qwen3_5", "bf16"), ("qwen3_5", "fp8")],
)
def test_weights_stay_in_their_stored_form(
    get_tiny: GetTiny, family: Family, layout: Layout
) -> None:
    folder = get_tiny(family, layout).folder
    runner = runner_of(folder)
    model = runner.stages[0]
    runner.run(prompt(20, seed=1), 7)
    kept = sum(t.untyped_storage().nbytes() for t in resident(model))
    with Checkpoint.open(folder) as checkpoint:
        assert kept <= 1.05 * checkpoint.total_bytes()
    assert model.weight_bytes == served_bytes(folder)
    hash_constants = 0 if not model.ngrams else 8 * (3 + 8 + 8)
    ropes = sum(t.nbytes for part in (model.context, model.vision) for t in rotary_tensors(part))
    assert kept == model.weight_bytes + ropes + hash_constants


def test_draft_tensors_are_loaded_and_counted(get_tiny: GetTiny, tmp_path: Path) -> None:
    with_draft = load(get_tiny("qwen4_exp", "fp8").folder)
    without = load(save_tiny(tmp_path, "qwen4_exp", "fp8", mtp=False).folder)
    assert with_draft.weights.parts.draft is not None and without.weights.parts.draft is None
    assert with_draft.weight_bytes > without.weight_bytes


def test_nano_checkpoint_loads_and_runs() -> None:
    runner = runner_of(NANO)
    logits = runner.run(prompt(30, seed=1), 30)
    assert logits.shape == (30, 1024)
    assert logits.isfinite().all() and logits.std() > 0
    assert runner.stages[0].weights.parts.draft is not None


def test_models_and_layers_never_fetch_values_from_the_device() -> None:
    """Batch data stay in tensors: only a kernel's reference may loop over values."""
    fetching = {"item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "unique", "masked_select"}
    sources = [
        p for part in ("models", "layers") for p in (ROOT / "services/engine" / part).glob("*.py")
    ]
    assert len(sources) > 10
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in fetching, f"{path.name}:{node.lineno} {node.attr}"


def test_groups_of_flash_next(get_tiny: GetTiny) -> None:
    kv, index, state = load(get_tiny("qwen4_exp", "fp8").folder).groups
    assert (kv.name, kv.kind, kv.page_tokens, kv.stride) == ("kv", "paged", 16, 1)
    assert (index.name, index.kind, index.page_tokens, index.stride) == ("index", "paged", 64, 4)
    assert (state.name, state.kind) == ("state", "state")
    shapes = {t.name: t.shape for t in (*kv.tensors, *index.tensors, *state.tensors)}
    assert shapes["layers.3.k"] == shapes["layers.3.v"] == (2, 64)
    assert shapes["layers.3.index"] == (32,)
    assert shapes["layers.3.raw_keys"] == (3, 32)
    assert shapes["layers.1.ple"] == (9, 512)
    assert shapes["layers.0.conv"] == (3, 320)
    assert shapes["layers.0.delta"] == (6, 32, 32)
    dtypes = {t.name: t.dtype for t in state.tensors}
    assert dtypes["layers.0.delta"] == torch.float32


@pytest.mark.parametrize(
    ("family", "layout", "name"),
    [
        ("qwen4_exp", "fp8", f"{TEXT}layers.2.mlp.gate.weight"),
        ("qwen4_exp", "fp8", f"{TEXT}layers.1.mlp.experts.5.up_proj.weight"),
        ("qwen4_exp", "fp8", f"{TEXT}layers.3.self_attn.indexer.k_layernorm.weight"),
        ("qwen4_exp", "fp8", "mtp.layers.0.self_attn.o_proj.weight"),
        ("qwen4_exp", "fp8", "lm_head.weight"),
        ("qwen3_5", "bf16", f"{TEXT}layers.4.linear_attn.dt_bias"),
        ("qwen3_5", "bf16", f"{TEXT}norm.weight"),
    ],
)
def test_missing_tensor_is_refused_by_name(copy, family: Family, layout: Layout, name: str) -> None:
    folder = copy(family, layout, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match="missing tensor of shape") as caught:
        load(folder)
    assert caught.value.tensor == name


def test_missing_table_shard_is_refused_by_name(copy) -> None:
    name = f"{TEXT}layers.1.ple.ple_embedding.ngram_embedding.shard_2.weight"
    with pytest.raises(CheckpointError) as caught:
        load(copy("qwen4_exp", "fp8", lambda t: t.pop(name)))
    assert caught.value.tensor == name


@pytest.mark.parametrize(
    "name",
    [f"{TEXT}layers.9.mlp.gate.weight", f"{TEXT}norm.weight", "model.visual.blocks.0.extra.weight"],
)
def test_surplus_tensor_is_refused_by_name(copy, name: str) -> None:
    folder = copy("qwen4_exp", "fp8", lambda t: t.update({name: torch.zeros(3, 5)}))
    with pytest.raises(CheckpointError, match=r"surplus tensor F32 \[3, 5\]") as caught:
        load(folder)
    assert caught.value.tensor == name


def test_known_leftovers_of_training_are_ignored(copy) -> None:
    extra = {
        f"{TEXT}hyper_connection_mixer.block_inject_weight.weight": torch.zeros(4, 512),
        f"{TEXT}layers.1.ple.ple_embedding.hashstats_count": torch.zeros(8),
        f"{TEXT}layers.1.ple.ple_embedding.token_lookup": torch.zeros(8),
    }
    load(copy("qwen4_exp", "fp8", lambda t: t.update(extra)))


@pytest.mark.parametrize(
    ("family", "name", "shape", "wanted"),
    [
        ("qwen4_exp", f"{TEXT}layers.0.linear_attn.in_proj_qkv.weight", (319, 128), (320, 128)),
        ("qwen4_exp", f"{TEXT}layers.2.mlp.experts.7.down_proj.weight", (128, 64), (128, 128)),
        ("qwen4_exp", f"{TEXT}layers.2.mlp.experts.7.down_proj.weight_scale_inv", (2, 1), (1, 1)),
        ("qwen3_5", f"{TEXT}layers.3.self_attn.q_norm.weight", (32,), (64,)),
        ("qwen3_5", "lm_head.weight", (500, 128), (512, 128)),
    ],
)
def test_shape_that_disagrees_is_refused_with_both_shapes(
    copy, family: Family, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    layout: Layout = "fp8" if family == "qwen4_exp" else "bf16"
    folder = copy(family, layout, lambda t: t.update({name: torch.zeros(shape).to(t[name].dtype)}))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert caught.value.tensor == name
    assert str(list(shape)) in str(caught.value) and str(list(wanted)) in str(caught.value)


def test_config_that_disagrees_with_its_tensors_is_refused(copy) -> None:
    folder = copy(
        "qwen3_5", "bf16", config=lambda c: c["text_config"].update(intermediate_size=384)
    )
    with pytest.raises(CheckpointError, match=r"disagrees with the config, which gives"):
        load(folder)


def test_nan_codes_are_refused(copy) -> None:
    name = f"{TEXT}layers.0.mlp.experts.3.up_proj.weight"

    def poison(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8)[5, 7] = 0xFF

    with pytest.raises(CheckpointError, match="1 NaN codes") as caught:
        load(copy("qwen4_exp", "fp8", poison))
    assert caught.value.tensor == name


def test_scale_that_is_not_finite_is_refused(copy) -> None:
    name = f"{TEXT}layers.0.mlp.experts.3.up_proj.weight_scale_inv"
    folder = copy("qwen4_exp", "fp8", lambda t: t[name].fill_(float("inf")))
    with pytest.raises(CheckpointError, match="scale is not finite") as caught:
        load(folder)
    assert caught.value.tensor == name


def test_fp8_weight_without_its_scale_is_refused(copy) -> None:
    name = f"{TEXT}layers.0.mlp.experts.3.up_proj.weight_scale_inv"
    with pytest.raises(CheckpointError, match=r"missing tensor of shape \[1, 1\]") as caught:
        load(copy("qwen4_exp", "fp8", lambda t: t.pop(name)))
    assert caught.value.tensor == name


def test_quantisation_is_decided_per_tensor_not_by_the_config(copy) -> None:
    ids = prompt(20, seed=2)
    expected = runner_of(copy("qwen4_exp", "fp8")).run(ids, 20)
    folder = copy("qwen4_exp", "fp8", config=lambda c: c.pop("quantization_config"))
    assert torch.equal(runner_of(folder).run(ids, 20), expected)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen9ForCausalLM"])
def test_unknown_architecture_is_refused_by_name(copy, name: str) -> None:
    folder = copy("qwen3_5", "bf16", config=lambda c: c.update(architectures=[name]))
    with pytest.raises(CheckpointError, match=name):
        load(folder)


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"architectures": ["Qwen4ExpForConditionalGeneration"]}, "qwen4_exp"),
        ({"architectures": ["Qwen3_8FlashNextForConditionalGeneration"]}, "qwen4_exp"),
        ({"architectures": ["Qwen3_8_FlashNextForConditionalGeneration"]}, "qwen4_exp"),
        ({"model_type": "qwen3_8_flash_next"}, "qwen4_exp"),
        ({"model_type": "qwen3_8_flash_next_text"}, "qwen4_exp"),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, "qwen3_5"),
        ({"model_type": "qwen3_5_text"}, "qwen3_5"),
    ],
)
def test_aliases_of_the_families(config: dict[str, Any], family: str) -> None:
    assert family_of(config) == family


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "128"),
        ("num_hidden_layers", 0),
        ("layer_types", ["linear_attention"]),
        ("layer_types", ["sliding_attention"] * 4),
        ("num_experts_per_tok", 9),
        ("indexer_budget", 18),
        ("indexer_head_dim", 8),
        ("ple_layer_ids", [2, 3]),
        ("output_gate_type", "tanh"),
        ("tie_word_embeddings", True),
        ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e7}),
    ],
)
def test_config_field_out_of_range_is_refused_by_name(copy, field: str, value: object) -> None:
    folder = copy("qwen4_exp", "fp8", config=lambda c: c["text_config"].update({field: value}))
    with pytest.raises(CheckpointError, match=r"rope_type" if "rope" in field else field):
        load(folder)


def test_older_rope_spelling_is_read(copy) -> None:
    def older(config: dict[str, Any]) -> None:
        text = config["text_config"]
        rope = text.pop("rope_parameters")
        text |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.25}
        text["rope_scaling"] = {"rope_type": "default", "mrope_section": rope["mrope_section"]}

    ids = prompt(20, seed=3)
    expected = runner_of(copy("qwen3_5", "bf16")).run(ids, 20)
    folder = copy("qwen3_5", "bf16", config=older)
    assert torch.equal(runner_of(folder).run(ids, 20), expected)


@pytest.mark.parametrize("missing_rows", ["layer_multipliers", "ngram_heads_vocab_sizes"])
def test_table_hashed_differently_is_refused(copy, missing_rows: str) -> None:
    name = f"{TEXT}layers.1.ple.ple_embedding.{missing_rows}"
    with pytest.raises(CheckpointError, match="hashed differently") as caught:
        load(copy("qwen4_exp", "fp8", lambda t: t[name].add_(2)))
    assert caught.value.tensor == name


def test_batch_without_rows_is_refused(get_tiny: GetTiny) -> None:
    from dataclasses import replace

    from tests.models.runner import Live, Part

    runner = runner_of(get_tiny("qwen4_exp", "fp8").folder)
    batch, _ = runner._batch([Part(Live(), [1, 2])])
    with pytest.raises(ValueError, match="ngram_rows"):
        runner.stages[0].forward(replace(batch, ngram_rows={}), runner.pools[0])
