"""GLM-5.3-Flash: Kimi delta attention and sparse latent attention on mixed residual streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.mhc import mhc_collapse
from services.common.checkpoint import Checkpoint, CheckpointError
from services.engine.cache.spec import CacheGroup, CacheTensor
from services.engine.checkpoints.loader import WeightReader, text_prefix
from services.engine.layers.context import INDEX_GROUP, KV_GROUP, STATE_GROUP, PassContext
from services.engine.layers.deepseek.streams import HyperMixer, Sublayer
from services.engine.layers.embedding import OutputHead, StreamEntry, TokenEmbedding
from services.engine.layers.glm.attention import LatentAttention
from services.engine.layers.glm.kda import KimiDeltaAttention
from services.engine.layers.glm.moe import GlmMoe
from services.engine.layers.linear import Linear
from services.engine.layers.mlp import DenseMlp
from services.engine.layers.norm import RmsNorm
from services.engine.layers.vision.glm import GlmVision, GlmVisionConfig
from services.engine.models.base import Collectives, Shard
from services.engine.models.common import INDEX_PAGE_TOKENS, KV_PAGE_TOKENS
from services.engine.models.glm5_next_config import GlmConfig, parse_config
from services.engine.models.stage import Stage, StageParts, load_weights
from services.engine.models.vision_config import glm_vision

# Legend: T packed tokens, N rows that need logits, n streams, D hidden, X = n * D.


@dataclass(frozen=True, slots=True)
class _Parts:
    """What loading a layer needs besides its weights."""

    config: GlmConfig
    dtype: torch.dtype
    collectives: Collectives
    vision: GlmVisionConfig | None


@dataclass(frozen=True, slots=True)
class Layer:
    """Streams [T, X] of the compute type to the same: mixer, then MLP, each in its sublayer."""

    streams: int
    tensors: Mapping[str, tuple[CacheTensor, ...]]
    attn_streams: Sublayer
    mixer: KimiDeltaAttention | LatentAttention
    ffn_streams: Sublayer
    mlp: DenseMlp | GlmMoe

    @classmethod
    def load(cls, reader: WeightReader, index: int, parts: _Parts) -> Layer:
        """Layer `index`, with `reader` at its tensors."""
        c, name, sum_ranks = parts.config, f"layers.{index}", parts.collectives
        attn, mlp = reader.at("self_attn"), reader.at("mlp")
        return cls(
            streams=c.streams.count,
            tensors=layer_tensors(c, index, parts.dtype, reader.shard.world),
            attn_streams=_sublayer(reader, "attn", "input_layernorm", c),
            mixer=KimiDeltaAttention.load(attn, name, c.kda, sum_ranks)
            if c.mixers[index] == "linear"
            else LatentAttention.load(attn, name, c.attention, sum_ranks),
            ffn_streams=_sublayer(reader, "ffn", "post_attention_layernorm", c),
            mlp=GlmMoe.load(mlp, c.moe, sum_ranks)
            if c.sparse[index]
            else DenseMlp.load(mlp, c.hidden, c.intermediate, sum_ranks, limit=c.limit),
        )

    def __call__(self, hidden_TX: torch.Tensor, ctx: PassContext) -> torch.Tensor:
        x_TnD = hidden_TX.unflatten(1, (self.streams, -1))
        x_TnD = self.attn_streams.around(x_TnD, lambda x: self.mixer(x, ctx))
        return self.ffn_streams.around(x_TnD, self.mlp).flatten(1)

    def cache_tensors(self) -> Mapping[str, tuple[CacheTensor, ...]]:
        return self.tensors


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """The layer behind the last: plain residual, attention and experts. Shares embedding, head."""

    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    projection: Linear  # of [embedding; hidden]
    input_norm: RmsNorm
    attention: LatentAttention
    mlp_norm: RmsNorm
    moe: GlmMoe
    norm: RmsNorm

    @classmethod
    def load(cls, reader: WeightReader, parts: _Parts) -> DraftLayer:
        """With `reader` at its tensors."""
        c, sum_ranks = parts.config, parts.collectives
        name = f"layers.{c.layers}"
        return cls(
            embedding_norm=_norm(reader, "enorm", c),
            hidden_norm=_norm(reader, "hnorm", c),
            projection=Linear.replicated(reader, "eh_proj", (c.hidden, 2 * c.hidden)),
            input_norm=_norm(reader, "input_layernorm", c),
            attention=LatentAttention.load(reader.at("self_attn"), name, c.attention, sum_ranks),
            mlp_norm=_norm(reader, "post_attention_layernorm", c),
            moe=GlmMoe.load(reader.at("mlp"), c.moe, sum_ranks),
            norm=_norm(reader, "shared_head.norm", c),
        )


@dataclass(frozen=True, slots=True)
class _Exit:
    """Mean of the streams, norm, head."""

    streams: int
    norm: RmsNorm
    head: OutputHead

    def __call__(self, hidden_NX: torch.Tensor) -> torch.Tensor:
        x_NnD = hidden_NX.unflatten(1, (self.streams, -1))
        share_Nn = x_NnD.new_full(x_NnD.shape[:2], 1 / self.streams, dtype=torch.float32)
        return self.head(self.norm(mhc_collapse(x_NnD, share_Nn).to(x_NnD.dtype)))


def load(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    shard: Shard,
    collectives: Collectives,
    quantised_cache: bool = False,
) -> Stage[PassContext]:
    """Check every tensor against the config, then read the part that `shard` names.

    `quantised_cache` stores pooled index keys in e4m3 instead of in `compute_dtype`. The hidden
    state between stages is the streams [T, X] in `compute_dtype`.
    """
    config = parse_config(checkpoint.config, quantised_cache=quantised_cache)
    has_tower = any(name.startswith("model.visual.") for name in checkpoint.names())
    vision = glm_vision(checkpoint, config.hidden) if has_tower else None
    parts = _Parts(config, compute_dtype, collectives, vision)
    prefix = text_prefix(checkpoint)
    weights = load_weights(
        checkpoint,
        device=device,
        shard=shard,
        layers=config.layers,
        read=lambda reader, held: _read(reader, prefix, parts, held),
    )
    return Stage(
        weights=weights,
        groups=cache_groups(config, weights.held, compute_dtype, shard.world),
        vocab_size=config.vocab,
        max_positions=config.max_positions,
        context=PassContext.make,
    )


def _read(reader: WeightReader, prefix: str, parts: _Parts, held: range) -> StageParts[PassContext]:
    """The layers of `held`, the embedding with the first of them, head and draft with the last."""
    text, c = reader.at(prefix), parts.config
    sizes = (c.vocab, c.hidden, parts.collectives)
    layers = tuple(Layer.load(text.at(f"layers.{i}"), i, parts) for i in held)
    entry = exit_ = draft = vision = None
    if held.start == 0:
        embedding = TokenEmbedding.load(text, "embed_tokens", *sizes)
        entry = StreamEntry(embedding, c.streams.count, parts.dtype)
        if parts.vision is not None:
            vision = GlmVision.load(reader, parts.vision, parts.dtype)
    if held.stop == c.layers:
        head = OutputHead.load(reader, "lm_head", *sizes)
        exit_ = _Exit(c.streams.count, _norm(text, "norm", c), head)
        draft = _draft(text, parts)
    return StageParts(layers, entry, exit_, draft, vision)


def _draft(text: WeightReader, parts: _Parts) -> DraftLayer | None:
    """The draft layer; CheckpointError where the config has one and the files do not."""
    name, count = f"layers.{parts.config.layers}", parts.config.drafts
    there = text.has(f"{name}.eh_proj.weight")
    if count and not there:
        raise CheckpointError(
            f"num_nextn_predict_layers is {count} and the draft layer is missing; releases keep "
            "it in files of its own, which a copy may have left out",
            tensor=text.full_name(f"{name}.eh_proj.weight"),
        )
    return DraftLayer.load(text.at(name), parts) if there and count != 0 else None


def _sublayer(reader: WeightReader, site: str, norm: str, config: GlmConfig) -> Sublayer:
    mixer = HyperMixer.load(reader, f"hc_{site}", config.streams)
    return Sublayer(mixer, _norm(reader, norm, config))


def _norm(reader: WeightReader, name: str, config: GlmConfig) -> RmsNorm:
    return RmsNorm.load(reader, name, config.hidden, config.eps, zero_centred=False)


def layer_tensors(
    config: GlmConfig, index: int, dtype: torch.dtype, world: int = 1
) -> Mapping[str, tuple[CacheTensor, ...]]:
    """Cache tensors of layer `index` by group, on one of `world` ranks.

    The index `config.layers` is that of the draft layer.
    """
    name = f"layers.{index}"
    if index < config.layers and config.mixers[index] == "linear":
        return {STATE_GROUP: config.kda.state_tensors(name, dtype, world)}
    indexer = config.attention.indexer
    return {
        KV_GROUP: config.attention.page_tensors(name, dtype),
        INDEX_GROUP: indexer.page_tensors(name, dtype),
        STATE_GROUP: indexer.state_tensors(name, dtype),
    }


def cache_groups(
    config: GlmConfig, held: range, dtype: torch.dtype, world: int = 1
) -> tuple[CacheGroup, ...]:
    """The groups of a stage of layers `held`: only those for which they keep something."""
    tensors: dict[str, tuple[CacheTensor, ...]] = {}
    for index in held:
        for group, more in layer_tensors(config, index, dtype, world).items():
            tensors[group] = tensors.get(group, ()) + more
    ratio = config.attention.indexer.ratio
    groups = []
    if kv := tensors.get(KV_GROUP):
        groups.append(CacheGroup(KV_GROUP, "paged", kv, page_tokens=KV_PAGE_TOKENS))
    if index_keys := tensors.get(INDEX_GROUP):
        page = INDEX_PAGE_TOKENS
        groups.append(CacheGroup(INDEX_GROUP, "paged", index_keys, page_tokens=page, stride=ratio))
    if state := tensors.get(STATE_GROUP):
        groups.append(CacheGroup(STATE_GROUP, "state", state))
    return tuple(groups)
