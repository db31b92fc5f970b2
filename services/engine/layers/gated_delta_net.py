"""Gated delta net: short convolution, delta-rule recurrence, gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.activation import sigmoid, softplus
from kernels.causal_conv import causal_conv, history
from kernels.gated_delta import gated_delta
from kernels.rms_norm import rms_norm_gated
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader, even_part, even_share
from services.engine.layers.context import StepContext
from services.engine.layers.linear import Linear, RowLinear
from services.engine.models.base import Collectives

# Legend: T tokens, G key heads, H value heads, K key dim, V value dim, C = 2 G K + H V channels.


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """Head counts and widths, all ranks together; `gate_type` is "silu" or "sigmoid"."""

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    gate_type: str
    eps: float

    @property
    def segments(self) -> tuple[int, int, int]:
        """Channels of q, k and v, in the order of `in_proj_qkv` and `conv1d`."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """x [T, hidden] to fp32 [T, hidden]; heads are split over ranks by key head.

    State per sequence: the last taps - 1 rows before the convolution, and S [H, K, V] in fp32.
    """

    name: str  # of its state tensors
    config: GatedDeltaConfig
    key_heads: int  # of this rank
    value_heads: int
    in_qkv: Linear
    in_z: Linear
    in_a: Linear
    in_b: Linear
    conv_CJ: torch.Tensor
    a_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_V: torch.Tensor
    out: RowLinear

    @classmethod
    def load(
        cls, reader: WeightReader, name: str, config: GatedDeltaConfig, collectives: Collectives
    ) -> GatedDeltaNet:
        shard, hidden, segments = reader.shard, config.hidden, config.segments
        channels, values, heads = sum(segments), segments[2], config.value_heads
        heads_part = even_part(shard, 0, heads, what="linear_num_value_heads")
        conv_part = even_part(shard, 0, *segments, what="conv1d")
        return cls(
            name=name,
            config=config,
            key_heads=even_share(config.key_heads, shard.world, "linear_num_key_heads"),
            value_heads=even_share(heads, shard.world, "linear_num_value_heads"),
            in_qkv=Linear.by_outputs(reader, "in_proj_qkv", (channels, hidden), *segments),
            in_z=Linear.by_outputs(reader, "in_proj_z", (values, hidden)),
            in_a=Linear.by_outputs(reader, "in_proj_a", (heads, hidden)),
            in_b=Linear.by_outputs(reader, "in_proj_b", (heads, hidden)),
            conv_CJ=reader.tensor("conv1d.weight", (channels, 1, config.taps), conv_part).squeeze(),
            a_log_H=reader.tensor("A_log", (heads,), heads_part),
            dt_bias_H=reader.tensor("dt_bias", (heads,), heads_part),
            norm_V=reader.tensor("norm.weight", (config.value_dim,)),
            out=RowLinear.by_inputs(reader, "out_proj", (hidden, values), collectives),
        )

    def state_tensors(self, dtype: torch.dtype) -> tuple[CacheTensor, ...]:
        """What one slot of the state group holds for this layer."""
        c = self.config
        channels = 2 * self.key_heads * c.key_dim + self.value_heads * c.value_dim
        matrix = (self.value_heads, c.key_dim, c.value_dim)
        return (
            CacheTensor(f"{self.name}.conv", (c.taps - 1, channels), dtype),
            CacheTensor(f"{self.name}.delta", matrix, torch.float32),
        )

    def __call__(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        q, k, v = self._convolve(x, ctx)
        decay_TH = -self.a_log_H.float().exp() * softplus(
            self.in_a(x, torch.float32) + self.dt_bias_H.float()
        )
        beta_TH = sigmoid(self.in_b(x, torch.float32))
        state = ctx.read_state(f"{self.name}.delta")
        o_THV, states_WHKV = gated_delta(
            q, k, v, decay_TH, beta_TH, state, ctx.batch.starts_B1, ctx.state_writes.token_W
        )
        ctx.write_state(f"{self.name}.delta", states_WHKV)
        gate = self.in_z(x).view(o_THV.shape)
        o = rms_norm_gated(
            o_THV, gate, self.norm_V, eps=self.config.eps, gate_type=self.config.gate_type
        )
        return self.out(o.flatten(1))

    def _convolve(
        self, x: torch.Tensor, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [T, G, K] and v [T, H, V] after the convolution."""
        mixed_TC = self.in_qkv(x)
        size = self.config.taps - 1
        past = history(mixed_TC, ctx.read_state(f"{self.name}.conv"))
        ctx.write_window(f"{self.name}.conv", past, size)
        mixed = causal_conv(past, ctx.history_rows(size), self.conv_CJ)
        c, keys = self.config, self.key_heads * self.config.key_dim
        heads = (-1, self.key_heads, c.key_dim)
        return (
            mixed[:, :keys].view(heads),
            mixed[:, keys : 2 * keys].view(heads),
            mixed[:, 2 * keys :].view(-1, self.value_heads, c.value_dim),
        )
