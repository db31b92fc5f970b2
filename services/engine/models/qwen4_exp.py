"""Qwen3.8-Flash-Next: gated delta net and QSA layers on gated hyper-connections, MoE, PLE."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from services.common.checkpoint import Checkpoint, CheckpointError
from services.common.ngram_table import TableLayout, find_tables
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import (
    WeightReader,
    text_prefix,
)
from services.engine.layers.attention import AttentionConfig, GatedAttention
from services.engine.layers.context import INDEX_GROUP, KV_GROUP, STATE_GROUP, StepContext
from services.engine.layers.embedding import OutputHead, StreamEntry, TokenEmbedding
from services.engine.layers.gated_delta_net import GatedDeltaNet
from services.engine.layers.hyper_connection import HyperConfig, HyperConnection
from services.engine.layers.indexer import IndexerConfig
from services.engine.layers.linear import Linear
from services.engine.layers.mlp import MoeConfig, SparseMoe
from services.engine.layers.norm import RmsNorm
from services.engine.layers.ple import PleConfig, PleLayer
from services.engine.layers.vision.qwen import QwenVision, QwenVisionConfig
from services.engine.models.base import Collectives, Shard
from services.engine.models.common import (
    INDEX_PAGE_TOKENS,
    VISION_TENSORS,
    ContextMaker,
    DecoderConfig,
    cache_groups,
    decoder_config,
    tower_of,
)
from services.engine.models.fields import Fields, text_fields
from services.engine.models.ngram import TableHash
from services.engine.models.stage import Stage, StageParts, load_weights

# Legend: T packed tokens, N rows that need logits, C streams, H hidden, X = C * H.

# Tensors without a place in the forward pass: the table (checked by `find_tables` and served
# from elsewhere) and leftovers of training that some exports carry.
_IGNORED = tuple(
    re.compile(pattern)
    for pattern in (
        r"\.ple\.ple_embedding\.ngram_embedding\.(shard_\d+\.)?weight$",
        r"\.ple\.ple_embedding\.(ngram_embedding\.weight_scale|layer_multipliers)$",
        r"\.ple\.ple_embedding\.ngram_heads_(vocab_sizes|offsets)$",
        r"(^|\.)hyper_connection_mixer\.block_inject_weight(\.weight)?$",
        r"(^|\.)hashstats_[^.]*$",
        r"(^|\.)token_lookup(\.weight)?$",
    )
)


@dataclass(frozen=True, slots=True)
class Qwen4ExpConfig:
    """The text part of config.json, checked. `ple_layer` is zero-based."""

    decoder: DecoderConfig
    attention: AttentionConfig
    streams: HyperConfig
    moe: MoeConfig
    ple: PleConfig | None
    ple_layer: int | None

    @property
    def block_ratio(self) -> int | None:
        """Tokens of an index block; None where attention is dense."""
        return self.attention.indexer.ratio if self.attention.indexer else None


def parse_config(config: Mapping[str, Any]) -> Qwen4ExpConfig:
    """Read config.json; CheckpointError names a field that is missing or out of range."""
    fields = text_fields(config)
    decoder = decoder_config(fields)
    streams = HyperConfig(
        hidden=decoder.hidden,
        count=fields.integer("hc_count", 4, least=2),
        low_rank=fields.integer("hc_lowrank", 320),
        eps=decoder.eps,
    )
    layer, ple = _ple(fields, streams, len(decoder.layer_types))
    return Qwen4ExpConfig(
        decoder=decoder,
        attention=AttentionConfig(
            hidden=decoder.hidden,
            heads=fields.integer("num_attention_heads"),
            kv_heads=fields.integer("num_key_value_heads"),
            head_dim=fields.integer("head_dim"),
            eps=decoder.eps,
            indexer=_indexer(fields, decoder),
        ),
        streams=streams,
        moe=_moe(fields, decoder.hidden),
        ple=ple,
        ple_layer=layer,
    )


def _moe(fields: Fields, hidden: int) -> MoeConfig:
    experts, top_k = fields.integer("num_experts"), fields.integer("num_experts_per_tok")
    if top_k > experts:
        raise fields.bad("num_experts_per_tok", f"at most num_experts {experts}")
    return MoeConfig(
        hidden=hidden,
        experts=experts,
        top_k=top_k,
        intermediate=fields.integer("moe_intermediate_size"),
        shared_intermediate=fields.integer("shared_expert_intermediate_size"),
        normalise=fields.flag("norm_topk_prob", True),
    )


def _indexer(fields: Fields, decoder: DecoderConfig) -> IndexerConfig | None:
    if not fields.has("indexer_n_heads"):
        return None
    ratio = fields.integer("indexer_compress_ratio", least=2)
    budget = fields.integer("indexer_budget")
    if INDEX_PAGE_TOKENS % ratio:
        raise fields.bad("indexer_compress_ratio", f"a divisor of {INDEX_PAGE_TOKENS}")
    if budget % ratio:
        raise fields.bad("indexer_budget", f"a multiple of indexer_compress_ratio {ratio}")
    if fields.integer("indexer_kv_heads", 1) != 1:
        raise fields.bad("indexer_kv_heads", "1")
    head_dim = fields.integer("indexer_head_dim")
    if head_dim < 2 * len(decoder.rope.inverse_F):
        raise fields.bad("indexer_head_dim", f">= {2 * len(decoder.rope.inverse_F)}")
    heads = fields.integer("indexer_n_heads")
    return IndexerConfig(decoder.hidden, heads, head_dim, budget, ratio, decoder.eps)


def _ple(fields: Fields, streams: HyperConfig, layers: int) -> tuple[int | None, PleConfig | None]:
    ids = sorted(set(fields.integers("ple_layer_ids")))
    if not ids:
        return None, None
    if len(ids) > 1 or not 1 <= ids[0] <= layers:
        raise fields.bad("ple_layer_ids", f"one layer number from 1 to {layers}")
    config = PleConfig(
        streams=streams,
        embed=fields.integer("ple_embed_dim", streams.hidden),
        taps=fields.integer("ple_conv_kernel_size", 4, least=2),
        dilation=fields.integer("ngram_size", 3, least=2),
    )
    return ids[0] - 1, config


@dataclass(frozen=True, slots=True)
class Layer:
    """PLE where the layer has one, then the attention half, then the MoE half."""

    dtype: torch.dtype
    ple: PleLayer | None
    attn_streams: HyperConnection
    mixer: GatedDeltaNet | GatedAttention
    mlp_streams: HyperConnection
    moe: SparseMoe

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        index: int,
        config: Qwen4ExpConfig,
        parts: _Parts,
        kind: str,
    ) -> Layer:
        name = f"layers.{index}"
        mixer: GatedDeltaNet | GatedAttention
        if kind == "linear_attention":
            delta = config.decoder.delta
            mixer = GatedDeltaNet.load(reader.at("linear_attn"), name, delta, parts.collectives)
        else:
            attention = config.attention
            mixer = GatedAttention.load(reader.at("self_attn"), name, attention, parts.collectives)
        ple = None
        if config.ple is not None and index == config.ple_layer:
            ple = PleLayer.load(
                reader.at("ple"), name, config.ple, parts.table_name, parts.table_scale
            )
        return cls(
            dtype=parts.dtype,
            ple=ple,
            attn_streams=HyperConnection.load(reader.at("attn_hyper_connection"), config.streams),
            mixer=mixer,
            mlp_streams=HyperConnection.load(reader.at("mlp_hyper_connection"), config.streams),
            moe=SparseMoe.load(reader.at("mlp"), config.moe, parts.collectives),
        )

    def __call__(self, hidden_TX: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        if self.ple is not None:
            hidden_TX = self.ple(hidden_TX, ctx, self.dtype)
        hidden_TX = self.attn_streams.around(hidden_TX, lambda x: self.mixer(x, ctx), self.dtype)
        return self.mlp_streams.around(hidden_TX, self.moe, self.dtype)

    def cache_tensors(self) -> Mapping[str, tuple[CacheTensor, ...]]:
        state = () if self.ple is None else self.ple.state_tensors(self.dtype)
        match self.mixer:
            case GatedDeltaNet() as delta:
                return {STATE_GROUP: state + delta.state_tensors(self.dtype)}
            case GatedAttention(indexer=indexer) as attention:
                tensors = {KV_GROUP: attention.page_tensors(self.dtype), STATE_GROUP: state}
                if indexer is not None:
                    tensors[INDEX_GROUP] = indexer.page_tensors(self.dtype)
                    tensors[STATE_GROUP] = state + indexer.state_tensors(self.dtype)
                return tensors


@dataclass(frozen=True, slots=True)
class _Parts:
    """What loading a layer needs besides its weights and sizes."""

    dtype: torch.dtype
    collectives: Collectives
    table_name: str
    table_scale: float


@dataclass(frozen=True, slots=True)
class _Exit:
    mixer: HyperConnection
    head: OutputHead
    dtype: torch.dtype

    def __call__(self, hidden_NX: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixer.read(hidden_NX).to(self.dtype))


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The draft layer: input projections, one QSA layer, a mixer. Shares embedding and head."""

    embedding_norm: RmsNorm
    hidden_norm: RmsNorm  # one norm over all streams
    embedding: Linear
    hidden: Linear
    layer: Layer
    mixer: HyperConnection

    @classmethod
    def load(cls, reader: WeightReader, config: Qwen4ExpConfig, parts: _Parts) -> MtpWeights:
        hidden, eps = config.decoder.hidden, config.decoder.eps
        index = len(config.decoder.layer_types)
        return cls(
            embedding_norm=RmsNorm.load(reader, "pre_fc_norm_embedding", hidden, eps),
            hidden_norm=RmsNorm.load(reader, "pre_fc_norm_hidden", config.streams.width, eps),
            embedding=Linear.replicated(reader, "fc_embedding", (hidden, hidden)),
            hidden=Linear.replicated(reader, "fc_hidden", (hidden, hidden)),
            layer=Layer.load(reader.at("layers.0"), index, config, parts, "full_attention"),
            mixer=HyperConnection.load(
                reader.at("hyper_connection_mixer"), config.streams, injects=False
            ),
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
    table = _table(checkpoint, config)
    parts = _Parts(
        compute_dtype, collectives, table.name if table else "", table.scale if table else 1.0
    )
    prefix = text_prefix(checkpoint)
    vision = tower_of(checkpoint, config.decoder, config.block_ratio)
    weights = load_weights(
        checkpoint,
        device=device,
        shard=shard,
        layers=len(config.decoder.layer_types),
        ignored=_IGNORED if vision else (VISION_TENSORS, *_IGNORED),
        read=lambda reader, held: _read(reader, prefix, config, parts, held, vision),
    )
    holds_table = config.ple_layer is not None and config.ple_layer in weights.held
    return Stage(
        weights=weights,
        groups=cache_groups(weights.layers, config.block_ratio),
        vocab_size=config.decoder.vocab,
        max_positions=config.decoder.max_positions,
        context=ContextMaker(config.decoder.rope.to(device), config.block_ratio),
        ngrams=(TableHash.of(table),) if table and holds_table else (),
    )


def _table(checkpoint: Checkpoint, config: Qwen4ExpConfig) -> TableLayout | None:
    if config.ple is None:
        return None
    tables = find_tables(checkpoint)
    if len(tables) != 1:
        raise CheckpointError(f"{len(tables)} n-gram tables found, one is served")
    return tables[0]


def _read(
    reader: WeightReader,
    prefix: str,
    config: Qwen4ExpConfig,
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
        embedding = TokenEmbedding.load(text, "embed_tokens", *sizes)
        entry = StreamEntry(embedding, config.streams.count, torch.float32)
        tower = QwenVision.load(reader, vision, parts.dtype) if vision else None
    if held.stop == len(d.layer_types):
        streams = text.at("hyper_connection_mixer")
        mixer = HyperConnection.load(streams, config.streams, injects=False)
        exit_ = _Exit(mixer, OutputHead.load(reader, "lm_head", *sizes), parts.dtype)
        if reader.has("mtp.fc_hidden.weight"):
            mtp = MtpWeights.load(reader.at("mtp"), config, parts)
    return StageParts(layers, entry, exit_, mtp, tower)
