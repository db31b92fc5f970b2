"""config.json of GLM-5.3-Flash, as released and as `transformers` saves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from services.engine.layers.deepseek.streams import MhcConfig
from services.engine.layers.glm.attention import MlaConfig
from services.engine.layers.glm.indexer import PoolIndexerConfig
from services.engine.layers.glm.kda import KdaConfig
from services.engine.layers.glm.moe import GlmMoeConfig
from services.engine.models.common import INDEX_PAGE_TOKENS
from services.engine.models.fields import Fields, text_fields

Mixer = Literal["linear", "indexed"]

_LAYER_TYPES = {
    "linear_attention": "linear",
    "full_attention": "indexed",
    "indexed_attention": "indexed",
    "deepseek_sparse_attention": "indexed",
}
_LOWER_BOUND = -5.0
# Fields whose other values would need another forward pass. Saved configs leave some out.
_FLAGS = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mhc": True,
    "mla_use_nope": True,
    "mla_nope": True,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
}
_CHOICES = {"hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


@dataclass(frozen=True, slots=True)
class GlmConfig:
    """The text part of config.json, checked.

    `mixers` and `sparse` (experts instead of a dense MLP) have one entry per layer. `drafts`
    counts the draft layers behind them; None where the config does not say.
    """

    vocab: int
    hidden: int
    max_positions: int
    eps: float
    mixers: tuple[Mixer, ...]
    sparse: tuple[bool, ...]
    drafts: int | None
    streams: MhcConfig
    kda: KdaConfig
    attention: MlaConfig
    intermediate: int
    moe: GlmMoeConfig

    @property
    def layers(self) -> int:
        """Number of layers, drafts left out."""
        return len(self.mixers)

    @property
    def limit(self) -> float:
        """Clamp of every SwiGLU."""
        return self.moe.limit


def parse_config(config: Mapping[str, Any], *, quantised_cache: bool = False) -> GlmConfig:
    """Read config.json; CheckpointError names a field that is missing or out of range.

    `quantised_cache` keeps pooled index keys in e4m3 with a scale, 132 bytes for 128 values.
    """
    fields = text_fields(config)
    _refuse_other_forms(fields)
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps", 1e-5)
    mixers = _mixers(fields)
    return GlmConfig(
        vocab=fields.integer("vocab_size"),
        hidden=hidden,
        max_positions=fields.integer("max_position_embeddings", 1 << 20),
        eps=eps,
        mixers=mixers,
        sparse=_sparse(fields, len(mixers)),
        drafts=_drafts(fields),
        streams=MhcConfig(
            hidden=hidden,
            count=fields.integer("hc_mult", 4, least=2),
            iterations=fields.integer("hc_sinkhorn_iters", 20),
            norm_eps=eps,
            hc_eps=fields.number("hc_eps", 1e-6),
        ),
        kda=_kda(fields, hidden, eps),
        attention=_attention(fields, hidden, eps, quantised_cache),
        intermediate=fields.integer("intermediate_size"),
        moe=_moe(fields, hidden),
    )


def _refuse_other_forms(fields: Fields) -> None:
    for name, wanted in _FLAGS.items():
        if fields.flag(name, wanted) != wanted:
            raise fields.bad(name, str(wanted).lower())
    for name, wanted_name in _CHOICES.items():
        fields.choice(name, wanted_name, {wanted_name: wanted_name})
    if fields.integer("qk_rope_head_dim", 0, least=0) != 0:
        raise fields.bad("qk_rope_head_dim", "0, since the model has no positions")
    heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.bad("num_key_value_heads", f"num_attention_heads {heads}")


def _mixers(fields: Fields) -> tuple[Mixer, ...]:
    """Every fourth layer has attention where `layer_types` is missing."""
    names = fields.layer_types(fields.integer("num_hidden_layers"), _LAYER_TYPES)
    mixers: tuple[Mixer, ...] = tuple("linear" if n == "linear" else "indexed" for n in names)
    kinds = _indexer_types(fields, len(mixers))
    for index, mixer in enumerate(mixers):
        if mixer == "indexed" and kinds[index] != "full":
            raise fields.bad("indexer_types", f'"full" for layer {index}, a layer with attention')
    return mixers


def _indexer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """`indexer_types`, or what `index_topk_pattern` or `index_topk_freq` say instead."""
    if fields.has("indexer_types"):
        kinds = fields.names("indexer_types")
        if len(kinds) < layers:
            raise fields.bad("indexer_types", f"{layers} names")
        return kinds
    if fields.has("index_topk_pattern"):
        return tuple({"F": "full"}.get(kind, "shared") for kind in _pattern(fields, layers))
    every = fields.integer("index_topk_freq", 1)
    offset = fields.integer("index_skip_topk_offset", 2, least=0)
    return tuple("shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers))


def _pattern(fields: Fields, layers: int) -> str:
    pattern = fields.text("index_topk_pattern")
    if len(pattern) < layers or set(pattern) - {"F", "S"}:
        raise fields.bad("index_topk_pattern", f"{layers} letters F or S")
    return pattern


def _sparse(fields: Fields, layers: int) -> tuple[bool, ...]:
    """`mlp_layer_types`, or experts on all but the first `first_k_dense_replace` layers."""
    if not fields.has("mlp_layer_types"):
        dense = fields.integer("first_k_dense_replace", 3, least=0)
        return tuple(i >= dense for i in range(layers))
    kinds = fields.names("mlp_layer_types")
    if len(kinds) < layers or set(kinds) - {"dense", "sparse"}:
        raise fields.bad("mlp_layer_types", f'{layers} names, "dense" or "sparse"')
    return tuple(kind == "sparse" for kind in kinds[:layers])


def _drafts(fields: Fields) -> int | None:
    if not fields.has("num_nextn_predict_layers"):
        return None
    count = fields.integer("num_nextn_predict_layers", least=0)
    if count > 1:
        raise fields.bad("num_nextn_predict_layers", "0 or 1")
    return count


def _kda(fields: Fields, hidden: int, eps: float) -> KdaConfig:
    """`linear_attn_config` overrides the flat fields."""
    linear = fields.inner("linear_attn_config")
    flat_bound = fields.below_zero("linear_lower_bound", _LOWER_BOUND)
    bound = linear.below_zero("gate_lower_bound", flat_bound)
    if bound is None and fields.has("linear_attn_config") and linear.flag("safe_gate", True):
        bound = _LOWER_BOUND
    heads = fields.integer("linear_num_heads", 64)
    head_dim = fields.integer("linear_head_dim", 128)
    taps = fields.integer("linear_conv_kernel_dim", 4, least=2)
    return KdaConfig(
        hidden=hidden,
        heads=linear.integer("num_heads", heads),
        head_dim=linear.integer("head_dim", head_dim),
        taps=linear.integer("short_conv_kernel_size", taps, least=2),
        lower_bound=bound,
        eps=eps,
    )


def _attention(fields: Fields, hidden: int, eps: float, coded: bool) -> MlaConfig:
    rank = fields.integer("q_lora_rank", 1536)
    return MlaConfig(
        hidden=hidden,
        heads=fields.integer("num_attention_heads"),
        query_rank=rank,
        latent=fields.integer("kv_lora_rank", 512),
        key_dim=fields.integer("qk_nope_head_dim", 256),
        value_dim=fields.integer("v_head_dim", 256),
        eps=eps,
        indexer=_indexer(fields, hidden, rank, coded),
    )


def _indexer(fields: Fields, hidden: int, rank: int, coded: bool) -> PoolIndexerConfig:
    """`index_kpool` has no default: the published file and the published code disagree."""
    ratio = fields.integer("index_kpool", least=2)
    budget = fields.integer("index_topk", 2048)
    head_dim = fields.integer("index_head_dim", 128)
    if INDEX_PAGE_TOKENS % ratio:
        raise fields.bad("index_kpool", f"a divisor of {INDEX_PAGE_TOKENS}")
    if budget % ratio:
        raise fields.bad("index_topk", f"a multiple of index_kpool {ratio}")
    if coded and head_dim.bit_count() != 1:
        raise fields.bad("index_head_dim", "a power of two, because the index cache is quantised")
    heads = fields.integer("index_n_heads", 32)
    return PoolIndexerConfig(hidden, rank, heads, head_dim, budget, ratio, coded)


def _moe(fields: Fields, hidden: int) -> GlmMoeConfig:
    experts, top_k = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok", 8)
    groups, top_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise fields.bad("n_group", f"a divisor of n_routed_experts {experts}, two in a group")
    if top_groups > groups:
        raise fields.bad("topk_group", f"at most n_group {groups}")
    if top_k > experts // groups * top_groups:
        most = experts // groups * top_groups
        raise fields.bad("num_experts_per_tok", f"at most {most} experts that can be chosen")
    intermediate = fields.integer("moe_intermediate_size")
    return GlmMoeConfig(
        hidden=hidden,
        experts=experts,
        top_k=top_k,
        groups=groups,
        top_groups=top_groups,
        intermediate=intermediate,
        shared_intermediate=intermediate * fields.integer("n_shared_experts", 1),
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 2.5),
        limit=fields.number("swiglu_limit", 10.0),
    )
