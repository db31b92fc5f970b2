"""Sizes of the vision towers, from config.json and preprocessor_config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from services.common.checkpoint import Checkpoint, CheckpointError
from services.engine.layers.vision.deepseek import DeepseekVisionConfig
from services.engine.layers.vision.glm import GlmVisionConfig
from services.engine.layers.vision.parts import Normalisation
from services.engine.layers.vision.qwen import QwenVisionConfig
from services.engine.models.fields import Fields

# Of preprocessor_config.json in the releases, for folders without one.
_QWEN_PIXELS = Normalisation((0.5,) * 3, (0.5,) * 3)
_GLM_PIXELS = Normalisation(
    (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
)


# Fields of config.json for the sizes of a DeepseekVisionConfig.
_V4_FIELDS = {
    "layers": "vision_n_layers",
    "width": "vision_dim",
    "heads": "vision_n_heads",
    "intermediate": "vision_inter_dim",
    "patch": "vision_patch_size",
    "downsample": "vision_downsample_ratio",
    "max_tokens": "vision_max_n_token",
}
_V41_FIELDS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "patch": "patch_size",
    "downsample": "downsample_ratio",
    "max_tokens": "max_image_tokens",
}


def deepseek_v4_vision(config: Mapping[str, Any], hidden: int) -> DeepseekVisionConfig | None:
    """The tower of Vision-Exp, whose fields lie beside those of the text model; None without."""
    fields = Fields(config, "")
    return _deepseek_vision(fields, _V4_FIELDS, "vision_rope_theta", hidden, tiled=True)


def deepseek_v41_vision(config: Mapping[str, Any], hidden: int) -> DeepseekVisionConfig | None:
    """The tower of V4.1 from `vision_config`; None without."""
    fields = Fields(config, "").inner("vision_config")
    return _deepseek_vision(fields, _V41_FIELDS, "rope_theta", hidden, tiled=False)


def _deepseek_vision(
    fields: Fields, names: Mapping[str, str], theta: str, hidden: int, *, tiled: bool
) -> DeepseekVisionConfig | None:
    if not fields.integer(names["layers"], 0, least=0):
        return None
    sizes = {size: fields.integer(name) for size, name in names.items()}
    rope_theta = fields.number(theta, 1e4)
    vision = DeepseekVisionConfig(**sizes, rope_theta=rope_theta, hidden=hidden, tiled=tiled)
    _check_heads(fields, names["width"], vision.width, vision.heads)
    return vision


def glm_vision(checkpoint: Checkpoint, hidden: int) -> GlmVisionConfig | None:
    """The tower of GLM-5.3-Flash; None without `vision_config`."""
    fields = Fields(checkpoint.config, "").inner("vision_config")
    if not fields.has("depth"):
        return None
    vision = GlmVisionConfig(
        layers=fields.integer("depth"),
        width=fields.integer("hidden_size"),
        heads=fields.integer("num_heads"),
        intermediate=fields.integer("intermediate_size"),
        projection=fields.integer("projection_intermediate_size"),
        patch=fields.integer("patch_size"),
        frames=fields.integer("temporal_patch_size", 2),
        merge=fields.integer("spatial_merge_size", 2),
        rope_theta=_theta(fields),
        limit=fields.number("swiglu_limit", 10.0),
        hidden=_same_hidden(fields, hidden),
        normalisation=_normalisation(checkpoint, _GLM_PIXELS),
    )
    fields.choice("hidden_act", "silu", {"silu": "silu"})
    if not fields.flag("attention_bias", True):
        raise fields.bad("attention_bias", "true")
    _check_heads(fields, "hidden_size", vision.width, vision.heads)
    return vision


def qwen_vision(
    checkpoint: Checkpoint, hidden: int, *, rope_lag: int = 0
) -> QwenVisionConfig | None:
    """The tower of Qwen3.8; None without `vision_config`. `rope_lag` as in `VisionModel`."""
    fields = Fields(checkpoint.config, "").inner("vision_config")
    if not fields.has("depth"):
        return None
    vision = QwenVisionConfig(
        layers=fields.integer("depth"),
        width=fields.integer("hidden_size"),
        heads=fields.integer("num_heads"),
        intermediate=fields.integer("intermediate_size"),
        patch=fields.integer("patch_size"),
        frames=fields.integer("temporal_patch_size", 2),
        merge=fields.integer("spatial_merge_size", 2),
        positions=fields.integer("num_position_embeddings"),
        rope_theta=_theta(fields),
        hidden=_same_hidden(fields, hidden),
        normalisation=_normalisation(checkpoint, _QWEN_PIXELS),
        rope_lag=rope_lag,
    )
    fields.choice("hidden_act", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "gelu_pytorch_tanh"})
    if fields.integers("deepstack_visual_indexes"):
        raise fields.bad("deepstack_visual_indexes", "empty")
    if vision.side**2 != vision.positions:
        raise fields.bad("num_position_embeddings", "a square number")
    _check_heads(fields, "hidden_size", vision.width, vision.heads)
    return vision


def _theta(fields: Fields) -> float:
    return fields.inner("rope_parameters").number("rope_theta", 1e4)


def _same_hidden(fields: Fields, hidden: int) -> int:
    if fields.integer("out_hidden_size") != hidden:
        raise fields.bad("out_hidden_size", f"hidden_size {hidden} of the text model")
    return hidden


def _normalisation(checkpoint: Checkpoint, default: Normalisation) -> Normalisation:
    """`image_mean` and `image_std` of preprocessor_config.json, or the release's."""
    path = checkpoint.folder / "preprocessor_config.json"
    if not path.is_file():
        return default
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"not JSON: {error}", file=path) from error
    mean, std = (
        _triple(values.get(name), given, f"{path.name}: {name}")
        for name, given in (("image_mean", default.mean), ("image_std", default.std))
    )
    if min(std) <= 0:
        raise CheckpointError(f"{path.name}: image_std is {std}, expected numbers above 0")
    return Normalisation(mean, std)


def _triple(
    value: object, default: tuple[float, float, float], what: str
) -> tuple[float, float, float]:
    if value is None:
        return default
    match value:
        case [int() | float() as red, int() | float() as green, int() | float() as blue]:
            triple = (float(red), float(green), float(blue))
            if all(map(math.isfinite, triple)):
                return triple
    raise CheckpointError(f"{what} is {value!r}, expected three numbers")


def _check_heads(fields: Fields, name: str, width: int, heads: int) -> None:
    """The rotation by rows and columns needs four equal parts of every head."""
    if width % (4 * heads):
        raise fields.bad(name, f"a multiple of four times the {heads} heads")
