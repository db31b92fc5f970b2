"""The trainable nano model; its state dict uses the release's tensor names.

Trunk tensors lack only the prefix `model.language_model.`, experts are fused 3-D tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from services.engine.checkpoints.nano import functional as fn
from services.engine.checkpoints.nano import ngram
from services.engine.checkpoints.nano.config import NanoConfig
from services.engine.checkpoints.nano.fp8 import through_blocks, through_table
from services.engine.checkpoints.nano.sparse_attention import AttentionShape, sparse_attention


@dataclass(slots=True)
class Ops:
    """The functions of a step; training may replace them by compiled ones of the same contract."""

    hc_read: Callable[..., Any] = fn.hc_read
    hc_write: Callable[..., Any] = fn.hc_write
    gdn_inputs: Callable[..., Any] = fn.gdn_inputs
    delta_rule: Callable[..., Any] = fn.delta_rule
    gdn_output: Callable[..., Any] = fn.gdn_output
    sparse_attention: Callable[..., Any] = sparse_attention
    moe: Callable[..., Any] = fn.moe
    shared_expert: Callable[..., Any] = fn.shared_expert
    ple: Callable[..., Any] = fn.ple


@dataclass(frozen=True, slots=True)
class Step:
    """One batch and its options, handed to every layer."""

    ids: Tensor  # [B, T] int64
    pos: Tensor  # [B, T] index in the document
    start: Tensor  # [B, T] row index of the document's first token
    cos: Tensor
    sin: Tensor
    select: bool
    dtype: torch.dtype
    ops: Ops


@dataclass(slots=True)
class Aux:
    """Side losses of a forward pass, summed over layers."""

    balance: Tensor
    divergence: Tensor
    margin: Tensor

    def add(self, balance: Tensor, divergence: Tensor | None, margin: Tensor | None) -> None:
        self.balance = self.balance + balance
        if divergence is not None and margin is not None:
            self.divergence = self.divergence + divergence
            self.margin = self.margin + margin


class Weight(nn.Module):
    """One tensor under the name `weight`, normal with the given deviation or constant."""

    def __init__(self, *shape: int, std: float | None = None, fill: float = 0.0) -> None:
        super().__init__()
        value = torch.full(shape, fill) if std is None else torch.randn(shape) * std
        self.weight = nn.Parameter(value)


def _dense(out: int, inner: int, gain: float = 1.0) -> Weight:
    return Weight(out, inner, std=gain * inner**-0.5)


class HyperConnection(nn.Module):
    """Gated read of the residual streams; with `inject` also the weights of the write."""

    def __init__(self, cfg: NanoConfig, inject: bool) -> None:
        super().__init__()
        wide = cfg.hc_count * cfg.hidden_size
        self.hc_norm = Weight(wide)
        self.input_mix_weight_down = _dense(cfg.hc_lowrank, wide)
        self.input_mix_weight_up = _dense(wide, cfg.hc_lowrank)
        self.block_inject_weight = _dense(cfg.hc_count, wide) if inject else None

    def read(self, streams: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        inject = self.block_inject_weight
        result: tuple[Tensor, Tensor] = step.ops.hc_read(
            streams,
            self.hc_norm.weight,
            self.input_mix_weight_down.weight,
            self.input_mix_weight_up.weight,
            None if inject is None else inject.weight,
            step.dtype,
        )
        return result


class GatedDeltaNet(nn.Module):
    """Linear attention with the gated delta rule."""

    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        heads, width = cfg.linear_num_value_heads, cfg.linear_value_head_dim
        self.shape = (cfg.linear_num_key_heads, heads, cfg.linear_key_head_dim, width)
        channels = 2 * cfg.linear_num_key_heads * cfg.linear_key_head_dim + heads * width
        self.in_proj_qkv = _dense(channels, cfg.hidden_size)
        self.in_proj_z = _dense(heads * width, cfg.hidden_size)
        self.in_proj_a = _dense(heads, cfg.hidden_size, 0.2)
        self.in_proj_b = _dense(heads, cfg.hidden_size, 0.5)
        self.conv1d = Weight(channels, 1, cfg.linear_conv_kernel_dim, std=0.5)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.5, 4.0).log())
        step = torch.empty(heads).uniform_(-6.5, -2.0).exp()
        self.dt_bias = nn.Parameter(step.expm1().log())
        self.norm = Weight(width, fill=1.0)
        self.out_proj = _dense(cfg.hidden_size, heads * width, 0.7)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        inputs = step.ops.gdn_inputs(
            x, self.in_proj_qkv.weight, self.conv1d.weight.squeeze(1), self.in_proj_a.weight,
            self.in_proj_b.weight, self.A_log, self.dt_bias, step.pos, self.shape,
        )  # fmt: skip
        out = step.ops.delta_rule(*inputs)
        result: Tensor = step.ops.gdn_output(
            out, x, self.in_proj_z.weight, self.norm.weight, self.out_proj.weight
        )
        return result


class Indexer(nn.Module):
    """Weights of the block selector."""

    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        self.index_qk_proj = _dense(
            (cfg.indexer_n_heads + 1) * cfg.indexer_head_dim, cfg.hidden_size
        )
        self.q_layernorm = Weight(cfg.indexer_head_dim)
        self.k_layernorm = Weight(cfg.indexer_head_dim)


class SparseAttention(nn.Module):
    """Attention over the blocks that its indexer selects."""

    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        self.shape = AttentionShape(
            cfg.num_attention_heads,
            cfg.num_key_value_heads,
            cfg.head_dim,
            cfg.indexer_n_heads,
            cfg.indexer_head_dim,
            cfg.indexer_compress_ratio,
            cfg.indexer_budget // cfg.indexer_compress_ratio,
        )
        wide = cfg.num_attention_heads * cfg.head_dim
        self.q_proj = _dense(2 * wide, cfg.hidden_size)
        self.k_proj = _dense(cfg.num_key_value_heads * cfg.head_dim, cfg.hidden_size)
        self.v_proj = _dense(cfg.num_key_value_heads * cfg.head_dim, cfg.hidden_size)
        self.o_proj = _dense(cfg.hidden_size, wide, 0.7)
        self.q_norm = Weight(cfg.head_dim)
        self.k_norm = Weight(cfg.head_dim)
        self.indexer = Indexer(cfg)

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        weights = {name: getattr(self, name).weight for name in names}
        weights["index_qk_proj"] = self.indexer.index_qk_proj.weight
        weights["index_q_norm"] = self.indexer.q_layernorm.weight
        weights["index_k_norm"] = self.indexer.k_layernorm.weight
        result: tuple[Tensor, Tensor, Tensor] = step.ops.sparse_attention(
            x, weights, step.start, step.cos, step.sin, self.shape, step.select
        )
        return result


class Experts(nn.Module):
    """Routed experts as fused tensors."""

    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        e, i, d = cfg.num_experts, cfg.moe_intermediate_size, cfg.hidden_size
        self.gate_up_proj = nn.Parameter(torch.randn(e, 2 * i, d) * d**-0.5)
        self.down_proj = nn.Parameter(torch.randn(e, d, i) * 0.7 * i**-0.5)


class SharedExpert(nn.Module):
    """The expert that every token uses."""

    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        width = cfg.shared_expert_intermediate_size
        self.gate_proj = _dense(width, cfg.hidden_size)
        self.up_proj = _dense(width, cfg.hidden_size)
        self.down_proj = _dense(cfg.hidden_size, width, 0.7)


class SparseMoe(nn.Module):
    """Router, routed experts and shared expert."""

    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        self.top_k = cfg.num_experts_per_tok
        self.gate = _dense(cfg.num_experts, cfg.hidden_size)
        self.experts = Experts(cfg)
        self.shared_expert = SharedExpert(cfg)
        self.shared_expert_gate = _dense(1, cfg.hidden_size)

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        y, balance = step.ops.moe(
            x,
            self.gate.weight,
            through_blocks(self.experts.gate_up_proj),
            through_blocks(self.experts.down_proj),
            self.top_k,
        )
        shared = self.shared_expert
        y = y + step.ops.shared_expert(
            x,
            shared.gate_proj.weight,
            shared.up_proj.weight,
            shared.down_proj.weight,
            self.shared_expert_gate.weight,
        )
        return y, balance


class Ple(nn.Module):
    """N-gram features for every stream."""

    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        wide = cfg.hc_count * cfg.hidden_size
        self.dilation, self.eos = cfg.ngram_size, cfg.endoftext_id
        self.key_proj = _dense(wide, cfg.ple_embed_dim)
        self.value_proj = _dense(cfg.hidden_size, cfg.ple_embed_dim)
        self.norm_key, self.norm_query, self.norm_conv = Weight(wide), Weight(wide), Weight(wide)
        self.conv1d = Weight(wide, 1, cfg.ple_conv_kernel_size)
        self.ple_embedding = ngram.NgramEmbedding(cfg)

    def forward(self, streams: Tensor, step: Step) -> Tensor:
        table = self.ple_embedding
        rows = fn.ple_rows(
            step.ids, step.pos, self.eos, table.layer_multipliers, table.ngram_heads_vocab_sizes,
            table.ngram_heads_offsets,
        )  # fmt: skip
        e = through_table(table.ngram_embedding.weight)[rows].flatten(-2).to(step.dtype)
        norms = (self.norm_key.weight, self.norm_query.weight, self.norm_conv.weight)
        result: Tensor = step.ops.ple(
            streams, e, self.key_proj.weight, self.value_proj.weight, norms,
            self.conv1d.weight.squeeze(1), step.pos, self.dilation,
        )  # fmt: skip
        return result


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, cfg: NanoConfig, kind: str, with_ple: bool) -> None:
        super().__init__()
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(cfg)
        else:
            self.self_attn = SparseAttention(cfg)
        self.linear = kind == "linear_attention"
        self.ple = Ple(cfg) if with_ple else None
        self.mlp = SparseMoe(cfg)
        self.attn_hyper_connection = HyperConnection(cfg, inject=True)
        self.mlp_hyper_connection = HyperConnection(cfg, inject=True)

    def forward(self, streams: Tensor, step: Step, aux: Aux) -> Tensor:
        if self.ple is not None:
            streams = self.ple(streams, step)
        x, inject = self.attn_hyper_connection.read(streams, step)
        divergence = margin = None
        if self.linear:
            y = self.linear_attn(x, step)
        else:
            y, divergence, margin = self.self_attn(x, step)
        streams = step.ops.hc_write(streams, y, inject)
        x, inject = self.mlp_hyper_connection.read(streams, step)
        y, balance = self.mlp(x, step)
        aux.add(balance, divergence, margin)
        result: Tensor = step.ops.hc_write(streams, y, inject)
        return result


class Mtp(nn.Module):
    """The draft layer: predicts the token after next from the trunk's streams."""

    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        width, wide = cfg.hidden_size, cfg.hidden_size * cfg.hc_count
        self.fc_embedding = _dense(width, width)
        self.fc_hidden = _dense(width, width)
        self.pre_fc_norm_embedding = Weight(width)
        self.pre_fc_norm_hidden = Weight(wide)
        self.layers = nn.ModuleList([Layer(cfg, "full_attention", with_ple=False)])
        self.hyper_connection_mixer = HyperConnection(cfg, inject=False)

    def forward(self, streams: Tensor, next_embedding: Tensor, step: Step, aux: Aux) -> Tensor:
        """Return the draft's streams for hidden states and the embedding of the following token."""
        dtype = step.dtype
        e = fn.rms_norm(next_embedding, self.pre_fc_norm_embedding.weight).to(dtype)
        h = fn.rms_norm(streams.flatten(2), self.pre_fc_norm_hidden.weight).to(dtype)
        h = fn.linear(h.unflatten(-1, streams.shape[2:]), self.fc_hidden.weight)
        mixed = h + fn.linear(e, self.fc_embedding.weight).unsqueeze(2)
        result: Tensor = self.layers[0](mixed.float(), step, aux)
        return result


class NanoModel(nn.Module):
    """Trunk, head and draft layer."""

    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = Weight(cfg.vocab_size, cfg.hidden_size, std=0.5)
        self.layers = nn.ModuleList(
            Layer(cfg, kind, index == cfg.ple_layer_index)
            for index, kind in enumerate(cfg.layer_types)
        )
        self.hyper_connection_mixer = HyperConnection(cfg, inject=False)
        self.lm_head = Weight(cfg.vocab_size, cfg.hidden_size, std=0.05)
        self.mtp = Mtp(cfg)

    def step(
        self, ids: Tensor, pos: Tensor, start: Tensor, select: bool, dtype: torch.dtype, ops: Ops
    ) -> Step:
        """Bundle a batch [B, T] (T a multiple of 64) for `trunk` and `drafts`."""
        cfg = self.cfg
        cos, sin = fn.rope_tables(ids.shape[1], cfg.rotary_dim, cfg.rope_theta, ids.device)
        return Step(ids, pos, start, cos, sin, select, dtype, ops)

    def new_aux(self) -> Aux:
        """Return zero side losses."""
        zero = self.lm_head.weight.new_zeros(())
        return Aux(zero, zero, zero)

    def trunk(self, step: Step, aux: Aux) -> tuple[Tensor, Tensor]:
        """Return the streams [B, T, S, D] before the final mixer and hidden states [B, T, D]."""
        x = self.embed_tokens.weight[step.ids]
        streams = x.unsqueeze(2).repeat(1, 1, self.cfg.hc_count, 1)
        for layer in self.layers:
            streams = layer(streams, step, aux)
        return streams, self.hyper_connection_mixer.read(streams, step)[0]

    def drafts(self, streams: Tensor, depth: int, step: Step, aux: Aux) -> list[Tensor]:
        """Return draft hidden states for `depth` chained drafts.

        Entry d at index i guesses token i + 2, having seen trunk states up to i - d. Nothing here
        passes a gradient into trunk, embedding or head.
        """
        following = self.embed_tokens.weight.detach()[step.ids.roll(-1, 1)]
        streams, out = streams.detach(), []
        for _ in range(depth):
            streams = self.mtp(streams, following, step, aux)
            out.append(self.mtp.hyper_connection_mixer.read(streams, step)[0])
            streams = streams.roll(1, 1)
        return out
