"""The `transformers` model on what a checkpoint's stored tensors mean, decoded independently."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

from services.engine.layers.vision.glm import NORM_EPS
from tests.models.tiny import matrix_value

Tensors = dict[str, torch.Tensor]
_NOT_TENSORS = ("weight_scale_inv", "weight_packed", "weight_scale", "weight_shape")
# Names of `transformers` as patterns, and the names of the release.
_RENAMED = (
    (r"self_attn\.forget_gate\.", "self_attn."),
    (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
)

# Fields of the release that `transformers` does not know and does not save of its own accord.
_UNKNOWN_FIELDS = (
    "num_nextn_predict_layers",
    "mhc",
    "scoring_func",
    "topk_method",
    "mla_use_nope",
    "first_k_dense_replace",
    "index_kpool_compress",
)


def stored_tensors(folder: Path) -> Tensors:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def values_of(stored: Tensors) -> Tensors:
    """fp32 values by release name, codes decoded by torch or by compressed-tensors."""
    packed = {n.removesuffix("_packed") for n in stored if n.endswith("_packed")}
    plain = {n for n in stored if not n.endswith(_NOT_TENSORS)}
    return {name: matrix_value(name, stored) for name in plain | packed}


def oracle_of(folder: Path) -> Glm5NextForConditionalGeneration:
    """In fp32; the draft layer is left out."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    for name in _UNKNOWN_FIELDS:
        config["text_config"].pop(name, None)
    config["vision_config"]["rms_norm_eps"] = NORM_EPS
    model_config = AutoConfig.for_model(**config)
    model_config._attn_implementation = "eager"
    model = Glm5NextForConditionalGeneration(model_config).float().eval()
    values = values_of(stored_tensors(folder))
    state = {name: _parameter(name, values) for name in model.state_dict()}
    model.load_state_dict(state, strict=True)
    return model


def _parameter(name: str, values: Tensors) -> torch.Tensor:
    for theirs, released in _RENAMED:
        name = re.sub(theirs, released, name)
    if name in values:
        return values[name]
    if name.endswith("self_attn.conv1d.weight"):
        base = name.removesuffix("conv1d.weight")
        return torch.cat([values[f"{base}{which}_conv1d.weight"] for which in "qkv"])
    base, kind = name.rsplit(".", 1)
    projections = ["down_proj"] if kind == "down_proj" else ["gate_proj", "up_proj"]
    experts = [n for n in values if n.startswith(f"{base}.") and n.endswith("up_proj.weight")]
    return torch.stack(
        [
            torch.cat([values[f"{base}.{e}.{p}.weight"] for p in projections])
            for e in range(len(experts))
        ]
    )


def logits(model: Glm5NextForConditionalGeneration, ids: list[int]) -> torch.Tensor:
    """fp32 [len(ids), vocab] of one prefill."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0]
