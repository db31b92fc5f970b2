"""Kimi delta attention: short convolution, delta rule with channel decays, gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.activation import sigmoid
from kernels.causal_conv import causal_conv, history
from kernels.kda import kda, log_decay
from kernels.rms_norm import rms_norm_gated
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader, even_part, even_share
from services.engine.layers.context import PassContext
from services.engine.layers.linear import Linear, RowLinear
from services.engine.models.base import Collectives

# Legend: T tokens, H heads, K width of a head (keys and values), C = 3 H K channels.


@dataclass(frozen=True, slots=True)
class KdaConfig:
    """Sizes, all ranks together; `lower_bound` of the log decay, None for the softplus form."""

    hidden: int
    heads: int
    head_dim: int
    taps: int
    lower_bound: float | None
    eps: float

    @property
    def width(self) -> int:
        """Channels of q, of k and of v."""
        return self.heads * self.head_dim

    def state_tensors(self, name: str, dtype: torch.dtype, world: int) -> tuple[CacheTensor, ...]:
        """What one slot of the state group holds for the layer `name` on one of `world` ranks."""
        heads = even_share(self.heads, world, "linear_attn_config.num_heads")
        channels, matrix = 3 * heads * self.head_dim, (heads, self.head_dim, self.head_dim)
        return (
            CacheTensor(f"{name}.conv", (self.taps - 1, channels), dtype),
            CacheTensor(f"{name}.delta", matrix, torch.float32),
        )


@dataclass(frozen=True, slots=True)
class _LowRank:
    """up(down x): [T, hidden] to [T, outputs of this rank] through `head_dim` values."""

    down: Linear
    up: Linear

    @classmethod
    def load(cls, reader: WeightReader, name: str, config: KdaConfig) -> _LowRank:
        """Read `<name>_a_proj` and `<name>_b_proj`."""
        down = Linear.replicated(reader, f"{name}_a_proj", (config.head_dim, config.hidden))
        up = Linear.by_outputs(reader, f"{name}_b_proj", (config.width, config.head_dim))
        return cls(down, up)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.up(self.down(x), out_dtype)


@dataclass(frozen=True, slots=True)
class KimiDeltaAttention:
    """x [T, hidden] to fp32 [T, hidden]; heads are split over ranks.

    State per sequence: the last taps - 1 rows before the convolution, and S [H, K, K] in fp32.
    """

    name: str  # of its state tensors
    config: KdaConfig
    heads: int  # of this rank
    q: Linear
    k: Linear
    v: Linear
    beta: Linear
    forget: _LowRank
    gate: _LowRank
    conv_CJ: torch.Tensor  # rows of q, then k, then v
    a_log_H: torch.Tensor
    dt_bias: torch.Tensor  # [H * K]
    norm_K: torch.Tensor
    out: RowLinear

    @classmethod
    def load(
        cls, reader: WeightReader, name: str, config: KdaConfig, collectives: Collectives
    ) -> KimiDeltaAttention:
        c, shard = config, reader.shard
        heads = even_share(c.heads, shard.world, "linear_attn_config.num_heads")
        heads_part = even_part(shard, 0, c.heads, what="A_log")
        part = even_part(shard, 0, c.width, what="q_conv1d")
        shape = (c.width, 1, c.taps)
        convs = [reader.tensor(f"{which}_conv1d.weight", shape, part) for which in "qkv"]
        return cls(
            name=name,
            config=config,
            heads=heads,
            q=Linear.by_outputs(reader, "q_proj", (c.width, c.hidden)),
            k=Linear.by_outputs(reader, "k_proj", (c.width, c.hidden)),
            v=Linear.by_outputs(reader, "v_proj", (c.width, c.hidden)),
            beta=Linear.by_outputs(reader, "b_proj", (c.heads, c.hidden)),
            forget=_LowRank.load(reader, "f", config),
            gate=_LowRank.load(reader, "g", config),
            conv_CJ=torch.cat(convs).squeeze(),
            a_log_H=reader.tensor("A_log", (c.heads,), heads_part),
            dt_bias=reader.tensor("dt_bias", (c.width,), part),
            norm_K=reader.tensor("o_norm.weight", (c.head_dim,)),
            out=RowLinear.by_inputs(reader, "o_proj", (c.hidden, c.width), collectives),
        )

    def __call__(self, x: torch.Tensor, ctx: PassContext) -> torch.Tensor:
        c = self.config
        heads = (-1, self.heads, c.head_dim)
        q, k, v = (part.view(heads) for part in self._convolve(x, ctx).chunk(3, dim=1))
        forget_THK = self.forget(x, torch.float32).view(heads)
        dt_bias_HK = self.dt_bias.view(self.heads, c.head_dim)
        decay_THK = log_decay(forget_THK, self.a_log_H, dt_bias_HK, lower_bound=c.lower_bound)
        beta_TH = sigmoid(self.beta(x, torch.float32))
        state = ctx.read_state(f"{self.name}.delta")
        o_THK, states_WHKK = kda(
            q, k, v, decay_THK, beta_TH, state, ctx.batch.starts_B1, ctx.state_writes.token_W
        )
        ctx.write_state(f"{self.name}.delta", states_WHKK)
        gate_THK = self.gate(x).view(heads)
        o = rms_norm_gated(o_THK, gate_THK, self.norm_K, eps=c.eps, gate_type="sigmoid")
        return self.out(o.flatten(1))

    def _convolve(self, x: torch.Tensor, ctx: PassContext) -> torch.Tensor:
        """q, k and v [T, C] behind each other, after the convolution."""
        mixed_TC = torch.cat([self.q(x), self.k(x), self.v(x)], dim=1)
        size = self.config.taps - 1
        past = history(mixed_TC, ctx.read_state(f"{self.name}.conv"))
        ctx.write_window(f"{self.name}.conv", past, size)
        return causal_conv(past, ctx.history_rows(size), self.conv_CJ)
