"""What a folder must hold, the draft layer above all, and which configs are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.checkpoint import Checkpoint, CheckpointError
from services.engine.checkpoints.nano.glm import LAYOUTS, Layout, nano_config
from services.engine.layers.vision.glm import GlmVision
from services.engine.models.glm5_next import DraftLayer
from services.engine.models.glm5_next_config import parse_config
from services.engine.models.registry import family_of
from tests.models.glm5_next.conftest import GetNano, Model, load, prompt
from tests.models.runner import Runner
from tests.models.test_loading import resident

TEXT = "model.language_model."
DRAFT_FILE = "model-nextn-00001-of-00001.safetensors"
Tensors = dict[str, torch.Tensor]
Copy = Callable[..., Path]


@pytest.fixture
def copy(get_nano: GetNano, tmp_path: Path) -> Copy:
    """A copy of the FP8 folder with its tensors or its config changed."""

    def make(
        tensors: Callable[[Tensors], Any] | None = None,
        config: Callable[[dict[str, Any]], Any] | None = None,
    ) -> Path:
        for file in get_nano("fp8").glob("*.*"):
            (tmp_path / file.name).symlink_to(file)
        if tensors is not None:
            stored = {n: t for f in tmp_path.glob("*.safetensors") for n, t in load_file(f).items()}
            for file in [
                *tmp_path.glob("*.safetensors"),
                tmp_path / "model.safetensors.index.json",
            ]:
                file.unlink()
            tensors(stored)
            save_file(stored, tmp_path / "model.safetensors")
        if config is not None:
            values = json.loads((tmp_path / "config.json").read_text())
            config(values)
            (tmp_path / "config.json").unlink()
            (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_stay_in_their_stored_form(get_nano: GetNano, layout: Layout) -> None:
    model = load(get_nano(layout))
    with Checkpoint.open(get_nano(layout)) as checkpoint:
        infos = [checkpoint.info(name) for name in checkpoint.names()]
    shapes = sum(i.nbytes for i in infos if i.name.endswith("weight_shape"))
    assert model.weight_bytes == sum(i.nbytes for i in infos) - shapes
    kept = sum(t.untyped_storage().nbytes() for t in resident(model))
    assert model.weight_bytes <= kept <= model.weight_bytes * 1.001  # angles of the tower


def test_draft_layer_and_tower_are_loaded_and_counted(nano: Model, get_nano: GetNano) -> None:
    assert isinstance(nano.weights.parts.draft, DraftLayer)
    assert isinstance(nano.vision, GlmVision)
    with Checkpoint.open(get_nano("fp8")) as checkpoint:
        draft = [n for n in checkpoint.names() if n.startswith(f"{TEXT}layers.5.")]
        assert {checkpoint.info(n).file.name for n in draft} == {DRAFT_FILE}
        assert not any("layers.5.hc_" in n for n in draft)


def test_a_missing_draft_layer_is_refused_by_name(copy: Copy) -> None:
    folder = copy(lambda t: [t.pop(n) for n in list(t) if ".layers.5." in n])
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 1 and the draft") as e:
        load(folder)
    assert e.value.tensor == f"{TEXT}layers.5.eh_proj.weight"


@pytest.mark.parametrize("count", [0, None])
def test_without_a_draft_layer_the_rest_is_the_same(copy: Copy, nano: Model, count: Any) -> None:
    folder = copy(
        lambda t: [t.pop(n) for n in list(t) if ".layers.5." in n],
        lambda c: c["text_config"].update(num_nextn_predict_layers=count),
    )
    model, ids = load(folder), prompt(20, seed=1)
    assert model.weights.parts.draft is None and model.weight_bytes < nano.weight_bytes
    assert torch.equal(Runner([model]).run(ids, 20), Runner([nano]).run(ids, 20))


def test_a_config_that_does_not_count_drafts_gets_the_one_that_is_there(copy: Copy) -> None:
    folder = copy(config=lambda c: c["text_config"].pop("num_nextn_predict_layers"))
    assert isinstance(load(folder).weights.parts.draft, DraftLayer)


@pytest.mark.parametrize(
    "name",
    [
        f"{TEXT}layers.5.mlp.experts.7.down_proj.weight",
        f"{TEXT}layers.5.self_attn.indexer.wk.weight",
        f"{TEXT}layers.5.shared_head.norm.weight",
        f"{TEXT}layers.0.hc_ffn_scale",
        f"{TEXT}layers.2.self_attn.dt_bias",
        f"{TEXT}layers.3.self_attn.indexer.index_kpool_compress_ape",
        f"{TEXT}layers.3.mlp.gate.e_score_correction_bias",
        "model.visual.merger.proj.weight",
    ],
)
def test_a_missing_tensor_is_refused_by_name(copy: Copy, name: str) -> None:
    with pytest.raises(CheckpointError, match="missing tensor of shape") as caught:
        load(copy(lambda t: t.pop(name)))
    assert caught.value.tensor == name


@pytest.mark.parametrize("name", [f"{TEXT}layers.5.hc_attn_fn", f"{TEXT}layers.6.norm.weight"])
def test_a_surplus_tensor_is_refused_by_name(copy: Copy, name: str) -> None:
    with pytest.raises(CheckpointError, match="surplus tensor") as caught:
        load(copy(lambda t: t.update({name: torch.zeros(2, 3)})))
    assert caught.value.tensor == name


@pytest.mark.parametrize(
    "name",
    [
        f"{TEXT}layers.3.mlp.experts.2.up_proj.weight",
        f"{TEXT}layers.1.self_attn.o_proj.weight",
        f"{TEXT}layers.5.mlp.shared_experts.down_proj.weight",
    ],
)
def test_a_missing_scale_is_refused_by_name(copy: Copy, name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(copy(lambda t: t.pop(f"{name}_scale_inv")))
    assert name in str(caught.value)


@pytest.mark.parametrize("layer", [4, 5])
def test_a_nan_code_is_refused_by_name(copy: Copy, layer: int) -> None:
    name = f"{TEXT}layers.{layer}.mlp.experts.6.gate_proj.weight"
    with pytest.raises(CheckpointError, match="NaN code") as caught:
        load(copy(lambda t: t[name].view(torch.uint8)[5, 7].fill_(0xFF)))
    assert caught.value.tensor == name


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{TEXT}layers.0.mlp.down_proj.weight", (256, 128)),
        (f"{TEXT}layers.0.self_attn.q_conv1d.weight", (4, 1, 128)),
        (f"{TEXT}layers.3.self_attn.indexer.index_kpool_compress_ape", (128, 4)),
        ("model.visual.merger.down_proj.weight", (64, 128)),
    ],
)
def test_a_flipped_shape_is_refused_by_name(copy: Copy, name: str, shape: tuple[int, ...]) -> None:
    def flip(tensors: Tensors) -> None:
        assert shape == tuple(reversed(tensors[name].shape))
        tensors[name] = torch.zeros(shape).to(tensors[name].dtype)

    with pytest.raises(CheckpointError) as caught:
        load(copy(flip))
    assert caught.value.tensor == name and str(list(shape)) in str(caught.value)


def test_a_draft_file_cut_short_is_refused_by_its_name(copy: Copy) -> None:
    path = copy() / DRAFT_FILE
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=f"truncated file.*{DRAFT_FILE}") as caught:
        load(path.parent)
    assert f"{TEXT}layers.5." in str(caught.value.tensor)


def test_latents_of_576_rows_are_refused_with_both_shapes(copy: Copy) -> None:
    """Other models of this kind have rows for rotated positions there."""
    name = f"{TEXT}layers.1.self_attn.kv_a_proj_with_mqa.weight"
    with pytest.raises(CheckpointError, match=r"\[192, 128\] disagrees .* \[128, 128\]"):
        load(copy(lambda t: t.update({name: torch.zeros(192, 128).to(t[name].dtype)})))


def test_a_flat_config_of_the_text_alone_is_read(copy: Copy, nano: Model) -> None:
    def text_alone(tensors: Tensors) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            if "visual" not in name:
                tensors[name.replace(TEXT, "model.")] = tensor

    def flat(config: dict[str, Any]) -> None:
        text, outer = config.pop("text_config"), dict(config)
        config.clear()
        config.update(text | {n: outer[n] for n in ("architectures", "quantization_config")})

    model, ids = load(copy(text_alone, flat)), prompt(20, seed=1)
    assert model.vision is None
    assert torch.equal(Runner([model]).run(ids, 20), Runner([nano]).run(ids, 20))


@pytest.mark.parametrize("spelling", ["full_attention", "indexed_attention"])
def test_three_spellings_of_the_layer_types(spelling: str) -> None:
    config = nano_config("bf16")
    expected = parse_config(config)
    types = config["text_config"]["layer_types"]
    renamed = [t.replace("deepseek_sparse_attention", spelling) for t in types]
    assert parse_config(nano_config("bf16", layer_types=renamed)) == expected
    assert expected.mixers == ("linear", "indexed", "linear", "indexed", "linear")


def test_what_is_left_out_has_the_released_values() -> None:
    released = {
        "vocab_size": 154880,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "n_routed_experts": 288,
        "index_kpool": 4,
    }
    config = parse_config(released)
    assert [i for i, m in enumerate(config.mixers) if m == "indexed"] == list(range(3, 45, 4))
    assert config.sparse == (False,) * 3 + (True,) * 42
    assert (config.kda.lower_bound, config.eps, config.drafts) == (-5.0, 1e-5, None)
    assert (config.streams.count, config.streams.iterations) == (4, 20)
    assert (config.streams.norm_eps, config.streams.hc_eps) == (1e-5, 1e-6)
    assert (config.moe.scale, config.moe.limit, config.attention.indexer.budget) == (2.5, 10, 2048)


@pytest.mark.parametrize(
    ("linear", "bound"),
    [({}, -5.0), ({"gate_lower_bound": None}, -5.0), ({"gate_lower_bound": -2.5}, -2.5)],
)
def test_lower_bound_of_the_decay(linear: dict[str, Any], bound: float) -> None:
    assert parse_config(nano_config("bf16", linear_attn_config=linear)).kda.lower_bound == bound
    flat = nano_config("bf16", linear_attn_config=None, linear_lower_bound=None)
    assert parse_config(flat).kda.lower_bound is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index_kpool", None),
        ("index_kpool", 3),
        ("index_topk", 18),
        ("index_kpool_always_select_tail", False),
        ("indexer_types", ["full", "shared", "full", "full", "full"]),
        ("index_topk_pattern", "FSFFF"),
        ("qk_rope_head_dim", 64),
        ("num_key_value_heads", 2),
        ("layer_types", ["linear_attention"] * 4),
        ("layer_types", ["sliding_attention"] * 5),
        ("mlp_layer_types", ["dense"] * 4),
        ("scoring_func", "softmax"),
        ("n_group", 3),
        ("topk_group", 2),
        ("num_experts_per_tok", 9),
        ("num_nextn_predict_layers", 2),
        ("mhc", False),
        ("attention_bias", True),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    changes: dict[str, Any] = {field: value}
    if field == "index_topk_pattern":
        changes["indexer_types"] = None
        field = "indexer_types"
    with pytest.raises(CheckpointError, match=field):
        parse_config(nano_config("bf16", **changes))


def test_names_of_the_family() -> None:
    assert family_of({"architectures": ["Glm5NextForConditionalGeneration"]}) == "glm5_next"
    assert family_of({"model_type": "glm5_next_text"}) == "glm5_next"
