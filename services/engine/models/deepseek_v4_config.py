"""config.json of DeepSeek-V4: Flash Preview, 0731 and Vision-Exp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kernels.cache_rows import INDEX_ROWS, RowFormat, latent_rows
from services.engine.layers.deepseek.attention import CSA_RATIO, HCA_RATIO, LatentConfig
from services.engine.layers.deepseek.context import Ropes
from services.engine.layers.deepseek.indexer import IndexerConfig
from services.engine.layers.deepseek.moe import DeepseekMoeConfig
from services.engine.layers.deepseek.streams import MhcConfig
from services.engine.layers.rope import default_rope, yarn_rope
from services.engine.layers.vision.deepseek import DeepseekVisionConfig
from services.engine.models.fields import Fields, text_fields


@dataclass(frozen=True, slots=True)
class DsparkConfig:
    """Draft stages that predict `block` tokens at once from the streams of `targets`."""

    block: int
    markov_rank: int
    noise_token: int
    targets: tuple[int, ...]
    moe: DeepseekMoeConfig


@dataclass(frozen=True, slots=True)
class DeepseekV4Config:
    """The text part of config.json, checked.

    `ratios` has one entry per layer: 0 for the window alone, 4 or 128 tokens per entry. The first
    `hash_layers` layers route by token id. `drafts` counts the classic draft layers that may be
    there; with `dspark` the draft is another one.
    """

    vocab: int
    hidden: int
    max_positions: int
    ratios: tuple[int, ...]
    window: int
    hash_layers: int
    drafts: int
    ropes: Ropes
    streams: MhcConfig
    attention: LatentConfig
    moe: DeepseekMoeConfig
    dspark: DsparkConfig | None
    vision: DeepseekVisionConfig | None

    @property
    def layers(self) -> int:
        """Number of layers, drafts left out."""
        return len(self.ratios)


def parse_config(config: Mapping[str, Any], *, quantised_cache: bool = False) -> DeepseekV4Config:
    """Read config.json; CheckpointError names a field that is missing or out of range.

    `quantised_cache` stores rows and entries in 584 bytes and index keys in 68 (released sizes).
    """
    fields = text_fields(config)
    refuse_other_forms(fields)
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    moe = moe_config(fields, hidden)
    ratios = _ratios(fields)
    return DeepseekV4Config(
        vocab=moe.vocab,
        hidden=hidden,
        max_positions=fields.integer("max_position_embeddings"),
        ratios=ratios,
        window=fields.integer("sliding_window"),
        hash_layers=_hash_layers(fields, len(ratios)),
        drafts=fields.integer("num_nextn_predict_layers", 0, least=0),
        ropes=latent_ropes(fields),
        streams=MhcConfig(
            hidden=hidden,
            count=fields.integer("hc_mult", 4),
            iterations=fields.integer("hc_sinkhorn_iters", 20),
            norm_eps=eps,
            hc_eps=fields.number("hc_eps", 1e-6),
        ),
        attention=_attention(fields, hidden, eps, quantised_cache),
        moe=moe,
        dspark=dspark_config(fields, moe, len(ratios)),
        vision=_vision(fields, hidden),
    )


def refuse_other_forms(fields: Fields) -> None:
    """Fields whose other values would need another forward pass."""
    for name in ("tie_word_embeddings", "attention_bias"):
        if fields.flag(name, False):
            raise fields.bad(name, "false")
    if fields.integer("num_key_value_heads", 1) != 1:
        raise fields.bad("num_key_value_heads", "1")
    fields.choice("hidden_act", "silu", {"silu": "silu"})
    fields.choice("scoring_func", "sqrtsoftplus", {"sqrtsoftplus": "sqrtsoftplus"})
    fields.choice("topk_method", "noaux_tc", {"noaux_tc": "noaux_tc"})


def _ratios(fields: Fields) -> tuple[int, ...]:
    """One per layer; entries behind the last layer belong to draft layers."""
    layers = fields.integer("num_hidden_layers")
    ratios = fields.integers("compress_ratios")
    allowed = (0, CSA_RATIO, HCA_RATIO)
    if len(ratios) < layers or any(r not in allowed for r in ratios[:layers]):
        raise fields.bad("compress_ratios", f"{layers} or more of {allowed}")
    return ratios[:layers]


def _hash_layers(fields: Fields, layers: int) -> int:
    count = fields.integer("num_hash_layers", 0, least=0)
    if count > layers:
        raise fields.bad("num_hash_layers", f"at most num_hidden_layers {layers}")
    return count


def latent_ropes(fields: Fields) -> Ropes:
    """Plain angles for window layers; YaRN without its attention factor for the others."""
    width = fields.integer("qk_rope_head_dim")
    if width % 2 or width > fields.integer("head_dim"):
        raise fields.bad("qk_rope_head_dim", "an even number of at most head_dim")
    scaling = fields.inner("rope_scaling")
    kind = "type" if scaling.has("type") else "rope_type"
    scaling.choice(kind, "", {"yarn": "yarn"})
    yarn = yarn_rope(
        fields.number("compress_rope_theta"),
        width,
        factor=scaling.number("factor"),
        original_positions=scaling.integer("original_max_position_embeddings"),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
    )
    window = default_rope(fields.number("rope_theta", 1e4), width)
    return Ropes(window=window, compressed=replace(yarn, scaling=1.0))


def _attention(fields: Fields, hidden: int, eps: float, quantised_cache: bool) -> LatentConfig:
    heads, groups = fields.integer("num_attention_heads"), fields.integer("o_groups")
    if heads % groups:
        raise fields.bad("o_groups", f"a divisor of num_attention_heads {heads}")
    query_rank, index_dim = fields.integer("q_lora_rank"), fields.integer("index_head_dim")
    if index_dim < fields.integer("qk_rope_head_dim"):
        raise fields.bad("index_head_dim", "at least qk_rope_head_dim")
    indexer = IndexerConfig(
        hidden=hidden,
        query_rank=query_rank,
        heads=fields.integer("index_n_heads"),
        head_dim=index_dim,
        top_k=fields.integer("index_topk"),
        ratio=CSA_RATIO,
        eps=eps,
        form=_key_form(fields) if quantised_cache else None,
    )
    return LatentConfig(
        hidden=hidden,
        heads=heads,
        head_dim=fields.integer("head_dim"),
        query_rank=query_rank,
        output_groups=groups,
        output_rank=fields.integer("o_lora_rank"),
        eps=eps,
        indexer=indexer,
        form=_row_form(fields) if quantised_cache else None,
    )


def _row_form(fields: Fields) -> RowFormat:
    width, rope = fields.integer("head_dim"), fields.integer("qk_rope_head_dim")
    form = latent_rows(width, rope)
    if (width - rope) % form.group:
        raise fields.bad("head_dim", f"qk_rope_head_dim {rope} plus groups of {form.group}")
    return form


def _key_form(fields: Fields) -> RowFormat:
    width = fields.integer("index_head_dim")
    if width % INDEX_ROWS.group or width & (width - 1):
        raise fields.bad("index_head_dim", f"a power of two of at least {INDEX_ROWS.group}")
    return INDEX_ROWS


def moe_config(fields: Fields, hidden: int) -> DeepseekMoeConfig:
    experts, top_k = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")
    if top_k > experts:
        raise fields.bad("num_experts_per_tok", f"at most n_routed_experts {experts}")
    intermediate = fields.integer("moe_intermediate_size")
    return DeepseekMoeConfig(
        hidden=hidden,
        vocab=fields.integer("vocab_size"),
        experts=experts,
        top_k=top_k,
        intermediate=intermediate,
        shared_intermediate=fields.integer("n_shared_experts", 1) * intermediate,
        scale=fields.number("routed_scaling_factor", 1.0),
        limit=fields.number("swiglu_limit") if fields.has("swiglu_limit") else None,
        normalise=fields.flag("norm_topk_prob", True),
    )


def dspark_config(fields: Fields, moe: DeepseekMoeConfig, layers: int) -> DsparkConfig | None:
    block = fields.integer("dspark_block_size", 0, least=0)
    if not block:
        return None
    targets = fields.integers("dspark_target_layer_ids")
    if not targets or not all(0 <= t < layers for t in targets):
        raise fields.bad("dspark_target_layer_ids", f"layer numbers below {layers}")
    noise = fields.integer("dspark_noise_token_id", least=0)
    if noise >= moe.vocab:
        raise fields.bad("dspark_noise_token_id", f"a token id below {moe.vocab}")
    experts = fields.integer("dspark_n_routed_experts", moe.experts)
    top_k = fields.integer("dspark_num_experts_per_tok", moe.top_k)
    return DsparkConfig(
        block=block,
        markov_rank=fields.integer("dspark_markov_rank"),
        noise_token=noise,
        targets=targets,
        moe=replace(moe, experts=experts, top_k=top_k),
    )


def _vision(fields: Fields, hidden: int) -> DeepseekVisionConfig | None:
    """Of Vision-Exp, whose `vision_*` fields lie beside the others."""
    layers = fields.integer("vision_n_layers", 0, least=0)
    if not layers:
        return None
    width, heads = fields.integer("vision_dim"), fields.integer("vision_n_heads")
    if width % (4 * heads):
        raise fields.bad("vision_n_heads", f"a divisor of vision_dim / 4 = {width / 4}")
    return DeepseekVisionConfig(
        layers=layers,
        width=width,
        heads=heads,
        intermediate=fields.integer("vision_inter_dim"),
        patch=fields.integer("vision_patch_size"),
        downsample=fields.integer("vision_downsample_ratio"),
        rope_theta=fields.number("vision_rope_theta", 1e4),
        max_tokens=fields.integer("vision_max_n_token", 384),
        hidden=hidden,
        tiled=True,
    )
