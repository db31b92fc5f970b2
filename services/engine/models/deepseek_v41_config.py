"""config.json of DeepSeek-V4.1-Flash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.common.checkpoint import CheckpointError
from services.engine.layers.deepseek.context import Ropes
from services.engine.layers.deepseek.moe import DeepseekMoeConfig
from services.engine.layers.deepseek.streams import MhcConfig
from services.engine.layers.deepseek41.attention import AttentionConfig, AttentionRole
from services.engine.layers.deepseek41.engram import EngramConfig
from services.engine.layers.deepseek41.handoff import Cut
from services.engine.layers.deepseek41.indexer import CandidateRole, IndexConfig
from services.engine.layers.deepseek41.source import CacheForms, SharedCache
from services.engine.layers.vision.deepseek import DeepseekVisionConfig
from services.engine.models.deepseek_v4_config import (
    DsparkConfig,
    dspark_config,
    latent_ropes,
    moe_config,
    refuse_other_forms,
)
from services.engine.models.fields import Fields

_RATIOS = (0, 1, 2)
_WEIGHT_SUM_EPS = 1e-20


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which layers fill caches and choose entries, and which read them.

    `ratios` has one entry per layer, 0 for the window alone. `sources` and `index_sources` are
    ascending; every source is an index source. Index sources after `candidate_source` are limited
    to the blocks that it chooses.
    """

    ratios: tuple[int, ...]
    sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    candidate_source: int | None

    def source_of(self, layer: int) -> int | None:
        """The layer whose cache `layer` reads; None where it has a window alone."""
        if not self.ratios[layer]:
            return None
        return max(s for s in self.sources if s <= layer)

    def index_source_of(self, layer: int) -> int:
        """The layer that chooses the entries for `layer`."""
        return max(s for s in self.index_sources if s <= layer)

    def candidate_role(self, layer: int) -> CandidateRole:
        """Of an index source."""
        if self.candidate_source is None or layer < self.candidate_source:
            return "none"
        return "source" if layer == self.candidate_source else "limited"

    def readers(self, source: int, first: int) -> list[int]:
        """The layers from `first` on that read the cache of `source`."""
        return [i for i in range(first, len(self.ratios)) if self.source_of(i) == source]

    def shared_across(self, cut: int) -> int | None:
        """The source before layer `cut` whose cache layers from `cut` on read."""
        before = [s for s in self.sources if s < cut]
        return before[-1] if before and self.readers(before[-1], cut) else None

    def is_limited_across(self, cut: int) -> bool:
        """Whether an index source from `cut` on is limited by blocks chosen before."""
        source = self.candidate_source
        return source is not None and source < cut <= self.index_sources[-1]


@dataclass(frozen=True, slots=True)
class DeepseekV41Config:
    """The text part of config.json, checked."""

    vocab: int
    hidden: int
    max_positions: int
    window: int
    sharing: Sharing
    ropes: Ropes
    streams: MhcConfig
    attention: AttentionConfig
    moe: DeepseekMoeConfig
    engram: EngramConfig | None
    engram_layers: tuple[int, ...]
    dspark: DsparkConfig | None
    vision: DeepseekVisionConfig | None

    @property
    def layers(self) -> int:
        """Number of layers, drafts left out."""
        return len(self.sharing.ratios)

    def cache(self, layer: int) -> SharedCache:
        """The cache that source `layer` fills."""
        a = self.attention
        ratio = self.sharing.ratios[layer]
        return SharedCache(layer, ratio, a.head_dim, a.index.head_dim, a.forms)

    def role(self, layer: int) -> AttentionRole:
        """What `layer` reads and publishes."""
        sharing, source = self.sharing, self.sharing.source_of(layer)
        if source is None:
            return AttentionRole()
        indexes = layer in sharing.index_sources
        return AttentionRole(
            cache=self.cache(source),
            is_source=source == layer,
            is_index_source=indexes,
            candidates=sharing.candidate_role(layer) if indexes else "none",
        )

    def cut(self, layer: int) -> Cut:
        """What crosses between layers `layer` - 1 and `layer`, either of which may be absent."""
        cut, index = Cut(self.streams.count), self.attention.index
        if not 0 < layer < self.layers:
            return cut
        if self.sharing.is_limited_across(layer):
            cut = replace(cut, candidates=index.top_blocks, block=index.block)
        source = self.sharing.shared_across(layer)
        if source is None:
            return cut
        readers = self.sharing.readers(source, layer)
        chosen_before = self.sharing.index_source_of(readers[0]) < layer
        return replace(
            cut,
            selected=index.top_k if chosen_before else 0,
            cache=self.cache(source),
            with_keys=any(i in self.sharing.index_sources for i in readers),
        )


def parse_config(config: Mapping[str, Any], forms: CacheForms) -> DeepseekV41Config:
    """Read config.json; CheckpointError names a field that is missing or out of range."""
    fields = _flat_fields(config)
    refuse_other_forms(fields)
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    moe = _top_one_undivided(replace(moe_config(fields, hidden), eps=_WEIGHT_SUM_EPS))
    sharing = _sharing(fields)
    dspark = dspark_config(fields, moe, len(sharing.ratios))
    streams = MhcConfig(
        hidden=hidden,
        count=fields.integer("hc_mult", 4),
        iterations=fields.integer("hc_sinkhorn_iters", 20),
        norm_eps=eps,
        hc_eps=fields.number("hc_eps", 1e-6),
    )
    engram_layers = _engram_layers(fields, len(sharing.ratios))
    return DeepseekV41Config(
        vocab=moe.vocab,
        hidden=hidden,
        max_positions=fields.integer("max_position_embeddings"),
        window=fields.integer("sliding_window"),
        sharing=sharing,
        ropes=latent_ropes(fields),
        streams=streams,
        attention=_attention(fields, hidden, eps, forms),
        moe=moe,
        engram=_engram(fields, streams) if engram_layers else None,
        engram_layers=engram_layers,
        dspark=replace(dspark, moe=_top_one_undivided(dspark.moe)) if dspark else None,
        vision=_vision(fields.inner("vision_config"), hidden)
        if fields.has("vision_config")
        else None,
    )


def _flat_fields(config: Mapping[str, Any]) -> Fields:
    """The text part and the top level as one; the top level wins."""
    text = config.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config is {type(text).__name__}, not an object")
    return Fields({**text, **config}, "")


def _top_one_undivided(moe: DeepseekMoeConfig) -> DeepseekMoeConfig:
    """With one expert per token its weight is its score, not 1."""
    return replace(moe, normalise=moe.normalise and moe.top_k > 1)


def _sharing(fields: Fields) -> Sharing:
    layers = fields.integer("num_hidden_layers")
    ratios = fields.integers("compress_ratios")
    if len(ratios) < layers or any(r not in _RATIOS for r in ratios[:layers]):
        raise fields.bad("compress_ratios", f"{layers} or more of {_RATIOS}")
    ratios = ratios[:layers]
    sources = _layer_ids(fields, "kv_source_layer_ids", ratios)
    index_sources = _layer_ids(fields, "index_source_layer_ids", ratios)
    for layer, ratio in enumerate(ratios):
        own = [s for s in sources if s <= layer]
        if ratio and (not own or ratios[own[-1]] != ratio):
            raise fields.bad("kv_source_layer_ids", f"a source of ratio {ratio} for layer {layer}")
    if not set(sources) <= set(index_sources):
        raise fields.bad("index_source_layer_ids", f"a list with every kv source of {sources}")
    return Sharing(ratios, sources, index_sources, _candidate_source(fields, sources))


def _layer_ids(fields: Fields, name: str, ratios: tuple[int, ...]) -> tuple[int, ...]:
    ids = tuple(sorted(set(fields.integers(name))))
    if any(not 0 <= i < len(ratios) or not ratios[i] for i in ids):
        raise fields.bad(name, "layers with a ratio of 1 or 2")
    return ids


def _candidate_source(fields: Fields, sources: tuple[int, ...]) -> int | None:
    if not fields.has("candidate_source_layer_id"):
        return None
    layer = fields.integer("candidate_source_layer_id", least=0)
    if not sources or layer != sources[-1]:
        raise fields.bad("candidate_source_layer_id", f"the last kv source of {sources}")
    return layer


def _attention(fields: Fields, hidden: int, eps: float, forms: CacheForms) -> AttentionConfig:
    heads, groups = fields.integer("num_attention_heads"), fields.integer("o_groups")
    if heads % groups:
        raise fields.bad("o_groups", f"a divisor of num_attention_heads {heads}")
    query_rank, index_dim = fields.integer("q_lora_rank"), fields.integer("index_head_dim")
    if index_dim < fields.integer("qk_rope_head_dim"):
        raise fields.bad("index_head_dim", "at least qk_rope_head_dim")
    limited = fields.has("candidate_source_layer_id")
    return AttentionConfig(
        hidden=hidden,
        heads=heads,
        head_dim=fields.integer("head_dim"),
        query_rank=query_rank,
        output_groups=groups,
        output_rank=fields.integer("o_lora_rank"),
        eps=eps,
        index=IndexConfig(
            hidden=hidden,
            query_rank=query_rank,
            heads=fields.integer("index_n_heads"),
            head_dim=index_dim,
            top_k=fields.integer("index_topk"),
            top_blocks=fields.integer("candidate_topk_blocks") if limited else 1,
            block=fields.integer("candidate_block_size") if limited else 1,
        ),
        forms=_fitting(fields, forms, index_dim),
    )


def _fitting(fields: Fields, forms: CacheForms, index_dim: int) -> CacheForms:
    """`forms`, where heads consist of whole groups of them."""
    for name, form in (
        ("head_dim", forms.window),
        ("head_dim", forms.entries),
        ("index_head_dim", forms.keys),
    ):
        if form is not None and fields.integer(name) % form.group:
            raise fields.bad(name, f"a multiple of {form.group} for a quantised cache")
    return forms


def _engram_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    ids = tuple(sorted(set(fields.integers("engram_layer_ids"))))
    if any(not 0 <= i < layers for i in ids):
        raise fields.bad("engram_layer_ids", f"layer numbers below {layers}")
    return ids


def _engram(fields: Fields, streams: MhcConfig) -> EngramConfig:
    orders = fields.integer("engram_max_ngram_size", least=2) - 1
    return EngramConfig(
        hidden=streams.hidden,
        streams=streams.count,
        heads=orders * fields.integer("engram_n_heads"),
        row_values=fields.integer("engram_head_dim"),
        eps=streams.norm_eps,
    )


def _vision(fields: Fields, hidden: int) -> DeepseekVisionConfig:
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if width % (4 * heads):
        raise fields.bad("num_attention_heads", f"a divisor of hidden_size / 4 = {width / 4}")
    return DeepseekVisionConfig(
        layers=fields.integer("num_hidden_layers"),
        width=width,
        heads=heads,
        intermediate=fields.integer("intermediate_size"),
        patch=fields.integer("patch_size"),
        downsample=fields.integer("downsample_ratio"),
        rope_theta=fields.number("rope_theta", 1e4),
        max_tokens=fields.integer("max_image_tokens"),
        hidden=hidden,
        tiled=False,
    )
