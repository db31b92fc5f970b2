"""Qwen3.8-27B: gated delta net and gated grouped-query attention layers, dense MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from services.common.checkpoint import Checkpoint
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader, text_prefix
from services.engine.layers.attention import AttentionConfig, GatedAttention
from services.engine.layers.context import KV_GROUP, STATE_GROUP, StepContext
from services.engine.layers.embedding import OutputHead, TokenEmbedding
from services.engine.layers.gated_delta_net import GatedDeltaNet
from services.engine.layers.linear import Linear
from services.engine.layers.mlp import DenseMlp
from services.engine.layers.norm import RmsNorm
from services.engine.layers.vision.qwen import QwenVision, QwenVisionConfig
from services.engine.models.base import Collectives, Shard
from services.engine.models.common import (
    VISION_TENSORS,
    ContextMaker,
    DecoderConfig,
    cache_groups,
    decoder_config,
    tower_of,
)
from services.engine.models.fields import text_fields
from services.engine.models.stage import Stage, StageParts, load_weights

# Legend: T packed tokens, N rows that need logits, H hidden.


@dataclass(frozen=True, slots=True)
class Qwen35Config:
    """The text part of config.json, checked."""

    decoder: DecoderConfig
    attention: AttentionConfig
    intermediate: int


def parse_config(config: Mapping[str, Any]) -> Qwen35Config:
    """Read config.json; CheckpointError names a field that is missing or out of range."""
    fields = text_fields(config)
    decoder = decoder_config(fields)
    if not fields.flag("attn_output_gate", True):
        raise fields.bad("attn_output_gate", "true")
    attention = AttentionConfig(
        hidden=decoder.hidden,
        heads=fields.integer("num_attention_heads"),
        kv_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim"),
        eps=decoder.eps,
    )
    return Qwen35Config(decoder, attention, fields.integer("intermediate_size"))


@dataclass(frozen=True, slots=True)
class Layer:
    """h + mixer(norm h), then h + mlp(norm h)."""

    dtype: torch.dtype
    input_norm: RmsNorm
    mixer: GatedDeltaNet | GatedAttention
    mlp_norm: RmsNorm
    mlp: DenseMlp

    @classmethod
    def load(
        cls, reader: WeightReader, index: int, config: Qwen35Config, parts: _Parts, kind: str
    ) -> Layer:
        name, d = f"layers.{index}", config.decoder
        mixer: GatedDeltaNet | GatedAttention
        if kind == "linear_attention":
            mixer = GatedDeltaNet.load(reader.at("linear_attn"), name, d.delta, parts.collectives)
        else:
            attention = config.attention
            mixer = GatedAttention.load(reader.at("self_attn"), name, attention, parts.collectives)
        sizes = (d.hidden, config.intermediate, parts.collectives)
        return cls(
            dtype=parts.dtype,
            input_norm=RmsNorm.load(reader, "input_layernorm", d.hidden, d.eps),
            mixer=mixer,
            mlp_norm=RmsNorm.load(reader, "post_attention_layernorm", d.hidden, d.eps),
            mlp=DenseMlp.load(reader.at("mlp"), *sizes),
        )

    def __call__(self, hidden_TH: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        hidden_TH = hidden_TH + self.mixer(self.input_norm(hidden_TH, self.dtype), ctx)
        return hidden_TH + self.mlp(self.mlp_norm(hidden_TH, self.dtype))

    def cache_tensors(self) -> Mapping[str, tuple[CacheTensor, ...]]:
        match self.mixer:
            case GatedDeltaNet() as delta:
                return {STATE_GROUP: delta.state_tensors(self.dtype)}
            case GatedAttention() as dense:
                return {KV_GROUP: dense.page_tensors(self.dtype)}


@dataclass(frozen=True, slots=True)
class _Parts:
    dtype: torch.dtype
    collectives: Collectives


@dataclass(frozen=True, slots=True)
class _Exit:
    norm: RmsNorm
    head: OutputHead
    dtype: torch.dtype

    def __call__(self, hidden_NX: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden_NX, self.dtype))


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The draft layer: projection of [embedding; hidden], one attention layer, final norm."""

    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    projection: Linear
    layer: Layer
    norm: RmsNorm

    @classmethod
    def load(cls, reader: WeightReader, config: Qwen35Config, parts: _Parts) -> MtpWeights:
        hidden, eps = config.decoder.hidden, config.decoder.eps
        index = len(config.decoder.layer_types)
        return cls(
            embedding_norm=RmsNorm.load(reader, "pre_fc_norm_embedding", hidden, eps),
            hidden_norm=RmsNorm.load(reader, "pre_fc_norm_hidden", hidden, eps),
            projection=Linear.replicated(reader, "fc", (hidden, 2 * hidden)),
            layer=Layer.load(reader.at("layers.0"), index, config, parts, "full_attention"),
            norm=RmsNorm.load(reader, "norm", hidden, eps),
        )


def load(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    shard: Shard,
    collectives: Collectives,
) -> Stage[StepContext]:
    """Check every tensor against the config, then read the part that `shard` names."""
    config = parse_config(checkpoint.config)
    parts = _Parts(compute_dtype, collectives)
    prefix = text_prefix(checkpoint)
    vision = tower_of(checkpoint, config.decoder)
    weights = load_weights(
        checkpoint,
        device=device,
        shard=shard,
        layers=len(config.decoder.layer_types),
        ignored=() if vision else (VISION_TENSORS,),
        read=lambda reader, held: _read(reader, prefix, config, parts, held, vision),
    )
    return Stage(
        weights=weights,
        groups=cache_groups(weights.layers, None),
        vocab_size=config.decoder.vocab,
        max_positions=config.decoder.max_positions,
        context=ContextMaker(config.decoder.rope.to(device), None),
    )


def _read(
    reader: WeightReader,
    prefix: str,
    config: Qwen35Config,
    parts: _Parts,
    held: range,
    vision: QwenVisionConfig | None,
) -> StageParts[StepContext]:
    """The layers of `held`, embedding and tower with the first, head and draft with the last."""
    text = reader.at(prefix)
    d = config.decoder
    sizes = (d.vocab, d.hidden, parts.collectives)
    layers = tuple(
        Layer.load(text.at(f"layers.{i}"), i, config, parts, d.layer_types[i]) for i in held
    )
    entry = exit_ = mtp = tower = None
    if held.start == 0:
        entry = TokenEmbedding.load(text, "embed_tokens", *sizes)
        tower = QwenVision.load(reader, vision, parts.dtype) if vision else None
    if held.stop == len(d.layer_types):
        norm = RmsNorm.load(text, "norm", d.hidden, d.eps)
        exit_ = _Exit(norm, OutputHead.load(reader, "lm_head", *sizes), parts.dtype)
        if reader.has("mtp.fc.weight"):
            mtp = MtpWeights.load(reader.at("mtp"), config, parts)
    return StageParts(layers, entry, exit_, mtp, tower)
