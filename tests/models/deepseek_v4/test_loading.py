"""What a DeepSeek-V4 folder must hold, and how its variants are told apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.checkpoint import Checkpoint, CheckpointError
from services.engine.models.deepseek_draft import DsparkDraft
from services.engine.models.deepseek_v4_config import parse_config
from services.engine.models.deepseek_v4_draft import MtpLayer
from services.engine.models.registry import family_of
from tests.models.deepseek_v4.conftest import GetNano, Model, load
from tests.models.test_loading import resident

Tensors = dict[str, torch.Tensor]
Copy = Callable[..., Path]


@pytest.fixture
def copy(get_nano: GetNano, tmp_path: Path) -> Copy:
    """A copy of a nano folder with its tensors or its config changed."""

    def make(
        tensors: Callable[[Tensors], Any] | None = None,
        config: Callable[[dict[str, Any]], Any] | None = None,
        variant: Any = "0731",
    ) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(get_nano(variant), folder)
        if tensors is not None:
            values = load_file(folder / "model.safetensors")
            tensors(values)
            save_file({n: t.contiguous() for n, t in values.items()}, folder / "model.safetensors")
        if config is not None:
            fields = json.loads((folder / "config.json").read_text())
            config(fields)
            (folder / "config.json").write_text(json.dumps(fields))
        return folder

    return make


def test_weights_stay_in_their_stored_form(nano: Model, get_nano: GetNano) -> None:
    """All bytes of the file are resident, drafts too, and hardly any other."""
    with Checkpoint.open(get_nano("0731")) as checkpoint:
        stored = sum(checkpoint.info(n).nbytes for n in checkpoint.names())
    kept = sum(t.untyped_storage().nbytes() for t in resident(nano.weights.parts))
    assert nano.weight_bytes == stored
    # The scales of output groups that share a block of 128 rows are repeated for each.
    assert stored <= kept <= stored + 9 * 2 * 4


def test_drafts_are_told_apart_by_config_and_tensors(get_nano: GetNano, nano: Model) -> None:
    dspark, mtp = nano.weights.parts.draft, load(get_nano("preview")).weights.parts.draft
    assert isinstance(dspark, DsparkDraft) and len(dspark.stages) == 3
    assert isinstance(mtp, MtpLayer)


def test_the_number_of_stages_is_that_of_the_namespaces(copy: Copy) -> None:
    """Two stages whose last has the heads: num_nextn_predict_layers does not matter."""

    def two(tensors: Tensors) -> None:
        kept = ("norm.", "hc_head", "markov_head", "confidence_head")
        for name in [n for n in tensors if n.startswith("mtp.2.")]:
            value, rest = tensors.pop(name), name.removeprefix("mtp.2.")
            if rest.startswith(kept):
                tensors[f"mtp.1.{rest}"] = value

    assert len(load(copy(two)).weights.parts.draft.stages) == 2


def test_a_checkpoint_without_drafts_loads(copy: Copy, nano: Model) -> None:
    def none(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("mtp.")]:
            del tensors[name]

    model = load(copy(none))
    assert model.weights.parts.draft is None
    assert model.weight_bytes < nano.weight_bytes


@pytest.mark.parametrize(
    "name",
    [
        "layers.4.attn.indexer.compressor.ape",
        "layers.0.ffn.gate.tid2eid",
        "layers.3.ffn.gate.bias",
        "layers.5.hc_ffn_scale",
        "hc_head_fn",
        "layers.1.ffn.experts.7.w3.weight",
        "mtp.1.attn.wo_a.weight",
        "mtp.2.markov_head.markov_w1.weight",
        "mtp.0.main_norm.weight",
    ],
)
def test_missing_tensor_is_refused_by_name(copy: Copy, name: str) -> None:
    with pytest.raises(CheckpointError, match="missing tensor") as caught:
        load(copy(lambda t: t.pop(name)))
    assert name in (caught.value.tensor, f"{caught.value.tensor}.weight")


@pytest.mark.parametrize("name", ["layers.1.attn.wkv.scale", "layers.2.ffn.experts.3.w2.scale"])
def test_missing_scale_is_refused_by_name(copy: Copy, name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(copy(lambda t: t.pop(name)))
    assert name.removesuffix(".scale") in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["layers.0.attn.compressor.ape", "layers.3.attn.indexer.wq_b.weight", "layers.6.ffn_norm.x"],
)
def test_surplus_tensor_is_refused_by_name(copy: Copy, name: str) -> None:
    """Also parts that another kind of layer has: an indexer beside ratio 128."""
    with pytest.raises(CheckpointError, match=r"surplus tensor F32 \[3, 5\]") as caught:
        load(copy(lambda t: t.update({name: torch.zeros(3, 5)})))
    assert caught.value.tensor == name


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.2.attn.wo_a.weight", (256, 64)),
        ("layers.2.ffn.experts.0.w1.weight", (128, 32)),
        ("layers.2.ffn.experts.0.w1.scale", (4, 64)),
        ("layers.3.attn.compressor.ape", (64, 128)),
        ("layers.0.ffn.gate.tid2eid", (2, 544)),
        ("hc_head_scale", (3,)),
    ],
)
def test_flipped_shape_is_refused_by_name(copy: Copy, name: str, shape: tuple[int, ...]) -> None:
    def flip(tensors: Tensors) -> None:
        tensors[name] = torch.zeros(shape).to(tensors[name].dtype)

    with pytest.raises(CheckpointError) as caught:
        load(copy(flip))
    assert caught.value.tensor == name and str(list(shape)) in str(caught.value)


@pytest.mark.parametrize("name", ["layers.1.attn.wq_b.weight", "mtp.0.main_proj.weight"])
def test_nan_code_is_refused_by_name(copy: Copy, name: str) -> None:
    def poison(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8)[5, 7] = 0x7F

    with pytest.raises(CheckpointError, match="NaN code") as caught:
        load(copy(poison))
    assert caught.value.tensor == name


def test_truncated_file_is_refused_by_name(copy: Copy, get_nano: GetNano) -> None:
    folder = copy()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"truncated file.*model\.safetensors") as caught:
        load(folder)
    with Checkpoint.open(get_nano("0731")) as whole:
        assert caught.value.tensor in set(whole.names())


def test_expert_table_with_a_number_that_is_no_expert_is_refused(copy: Copy) -> None:
    name = "layers.1.ffn.gate.tid2eid"
    with pytest.raises(CheckpointError, match=r"outside 0\.\.7") as caught:
        load(copy(lambda t: t[name].view(-1)[9].fill_(8)))
    assert caught.value.tensor == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compress_ratios", [0, 0, 4]),
        ("compress_ratios", [0, 0, 4, 128, 2, 128]),
        ("num_hash_layers", 7),
        ("num_experts_per_tok", 9),
        ("o_groups", 3),
        ("index_head_dim", 8),
        ("qk_rope_head_dim", 15),
        ("scoring_func", "softmax"),
        ("num_key_value_heads", 2),
        ("rope_scaling", {"type": "linear"}),
        ("dspark_target_layer_ids", [3, 4, 6]),
        ("dspark_noise_token_id", 544),
        ("rms_norm_eps", None),
        ("sliding_window", 0),
    ],
)
def test_config_field_out_of_range_is_refused_by_name(
    copy: Copy, field: str, value: object
) -> None:
    folder = copy(config=lambda c: c.update({field: value}))
    with pytest.raises(CheckpointError, match=field):
        load(folder)


def test_released_fields_are_read() -> None:
    """The published values of 0731, as far as they decide sizes."""
    layers = 43
    config = parse_config(RELEASED)
    assert config.layers == layers and config.ratios == (0, 0, *[4, 128] * 20, 4)
    assert config.attention.indexer.top_k == 512 and config.window == 128
    assert config.moe.limit == 10.0 and config.moe.scale == 1.5
    assert config.dspark is not None and config.dspark.targets == (40, 41, 42)
    assert family_of(RELEASED) == "deepseek_v4"


RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "tie_word_embeddings": False,
    "attention_bias": False,
}
