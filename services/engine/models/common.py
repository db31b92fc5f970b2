"""What both Qwen families share: config parts, the context of a pass, cache groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.checkpoint import Checkpoint, CheckpointError
from services.engine.cache.spec import CacheGroup, CachePools, CacheTensor
from services.engine.layers.context import (
    INDEX_GROUP,
    KV_GROUP,
    STATE_GROUP,
    StepContext,
    make_context,
)
from services.engine.layers.gated_delta_net import GatedDeltaConfig
from services.engine.layers.rope import RotaryFrequencies
from services.engine.layers.vision.qwen import QwenVisionConfig
from services.engine.models.fields import Fields
from services.engine.models.stage import DecoderLayer
from services.engine.models.vision_config import qwen_vision
from services.engine.runtime.batch import StepBatch

KV_PAGE_TOKENS = 16
INDEX_PAGE_TOKENS = 64
LAYER_TYPES = {
    "linear_attention": "linear_attention",
    "full_attention": "full_attention",
    "indexed_attention": "full_attention",
}
# Tensors of the vision tower, for a family that does not load it.
VISION_TENSORS = re.compile(
    r"^(model\.)?visual\.("
    r"patch_embed\.proj|pos_embed|merger\.(norm|linear_fc[12])|deepstack_merger_list\.\d+\..+"
    r"|blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.linear_fc[12])"
    r")\.(weight|bias|weight_scale_inv)$"
)
_GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes that every decoder has, all ranks together."""

    vocab: int
    hidden: int
    layer_types: tuple[str, ...]  # "linear_attention" or "full_attention"
    max_positions: int
    eps: float
    rope: RotaryFrequencies
    delta: GatedDeltaConfig


def decoder_config(fields: Fields) -> DecoderConfig:
    """Read and check the fields that both families have."""
    hidden = fields.integer("hidden_size")
    eps = fields.number("rms_norm_eps", 1e-6)
    layers = fields.integer("num_hidden_layers")
    if fields.flag("tie_word_embeddings", False):
        raise fields.bad("tie_word_embeddings", "false")
    if fields.flag("attention_bias", False):
        raise fields.bad("attention_bias", "false")
    fields.choice("hidden_act", "silu", {"silu": "silu"})
    return DecoderConfig(
        vocab=fields.integer("vocab_size"),
        hidden=hidden,
        layer_types=fields.layer_types(layers, LAYER_TYPES),
        max_positions=fields.integer("max_position_embeddings"),
        eps=eps,
        rope=fields.rope(fields.integer("head_dim")),
        delta=_delta_config(fields, hidden, eps),
    )


def _delta_config(fields: Fields, hidden: int, eps: float) -> GatedDeltaConfig:
    key_heads = fields.integer("linear_num_key_heads")
    value_heads = fields.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise fields.bad("linear_num_value_heads", f"a multiple of {key_heads} key heads")
    return GatedDeltaConfig(
        hidden=hidden,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        taps=fields.integer("linear_conv_kernel_dim", least=2),
        gate_type=fields.choice("output_gate_type", "silu", _GATES),
        eps=eps,
    )


def tower_of(
    checkpoint: Checkpoint, decoder: DecoderConfig, block_ratio: int | None = None
) -> QwenVisionConfig | None:
    """The vision tower; None where the checkpoint has none or was saved without it."""
    if not any(VISION_TENSORS.search(name) for name in checkpoint.names()):
        return None
    vision = qwen_vision(checkpoint, decoder.hidden, rope_lag=(block_ratio or 1) - 1)
    if vision is not None and decoder.rope.axis_F is None:
        raise CheckpointError(
            "config.json: text_config.rope_parameters.mrope_section is missing, expected three "
            "numbers, because there is a vision_config"
        )
    return vision


@dataclass(frozen=True, slots=True)
class ContextMaker:
    """Makes the context of a forward pass; `block_ratio` as in `make_context`."""

    rope: RotaryFrequencies
    block_ratio: int | None

    def __call__(self, batch: StepBatch, pools: CachePools) -> StepContext:
        return make_context(batch, pools, self.rope, self.block_ratio)


def cache_groups(
    layers: Sequence[DecoderLayer[StepContext]], block_ratio: int | None
) -> tuple[CacheGroup, ...]:
    """The groups of a stage: only those for which its layers keep something."""
    tensors: dict[str, tuple[CacheTensor, ...]] = {KV_GROUP: (), INDEX_GROUP: (), STATE_GROUP: ()}
    for layer in layers:
        for group, more in layer.cache_tensors().items():
            tensors[group] += more
    groups = []
    if kv := tensors[KV_GROUP]:
        groups.append(CacheGroup(KV_GROUP, "paged", kv, page_tokens=KV_PAGE_TOKENS))
    if index := tensors[INDEX_GROUP]:
        assert block_ratio is not None
        page = INDEX_PAGE_TOKENS
        groups.append(CacheGroup(INDEX_GROUP, "paged", index, page_tokens=page, stride=block_ratio))
    if state := tensors[STATE_GROUP]:
        groups.append(CacheGroup(STATE_GROUP, "state", state))
    return tuple(groups)
