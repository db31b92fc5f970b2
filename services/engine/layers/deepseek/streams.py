"""Residual streams with manifold-constrained hyper-connections around each half of a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.mhc import mhc_collapse, mhc_expand, mhc_head, mhc_mix
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.norm import RmsNorm

# Legend: T tokens, n streams, D hidden, M = (2 + n) n mixing values, X = n * D.


@dataclass(frozen=True, slots=True)
class MhcConfig:
    """`count` streams of width `hidden`; `norm_eps` of the statistics, `hc_eps` of the weights."""

    hidden: int
    count: int
    iterations: int
    norm_eps: float
    hc_eps: float

    @property
    def width(self) -> int:
        """Values of all streams of a token."""
        return self.hidden * self.count


@dataclass(frozen=True, slots=True)
class Mixes:
    """Weights of one sublayer, fp32; see `kernels.mhc.mhc_mix`."""

    pre_Tn: torch.Tensor
    post_Tn: torch.Tensor
    comb_Tnn: torch.Tensor


@dataclass(frozen=True, slots=True)
class HyperMixer:
    """Mixing weights of one sublayer from the streams. On every rank whole, in fp32."""

    config: MhcConfig
    fn_MX: torch.Tensor
    base_M: torch.Tensor
    scale_3: torch.Tensor

    @classmethod
    def load(cls, reader: WeightReader, name: str, config: MhcConfig) -> HyperMixer:
        """Read `<name>_fn`, `<name>_base` and `<name>_scale`."""
        values = (2 + config.count) * config.count
        return cls(
            config=config,
            fn_MX=reader.tensor(f"{name}_fn", (values, config.width)).float(),
            base_M=reader.tensor(f"{name}_base", (values,)).float(),
            scale_3=reader.tensor(f"{name}_scale", (3,)).float(),
        )

    def __call__(self, x_TnD: torch.Tensor) -> Mixes:
        c = self.config
        return Mixes(
            *mhc_mix(
                x_TnD,
                self.fn_MX,
                self.base_M,
                self.scale_3,
                norm_eps=c.norm_eps,
                hc_eps=c.hc_eps,
                iterations=c.iterations,
            )
        )


@dataclass(frozen=True, slots=True)
class Sublayer:
    """X'[j] = post[j] block(norm(sum_i pre[i] X[i])) + sum_i comb[i, j] X[i]."""

    mixer: HyperMixer
    norm: RmsNorm

    @classmethod
    def load(cls, reader: WeightReader, name: str, config: MhcConfig) -> Sublayer:
        """The sublayer `name`: "attn" or "ffn"."""
        norm = RmsNorm.load(
            reader, f"{name}_norm", config.hidden, config.norm_eps, zero_centred=False
        )
        return cls(HyperMixer.load(reader, f"hc_{name}", config), norm)

    def around(
        self, x_TnD: torch.Tensor, block: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The streams after `block`, which maps [T, D] of their type to [T, D]."""
        mixes = self.mixer(x_TnD)
        x_TD = self.norm(mhc_collapse(x_TnD, mixes.pre_Tn).to(x_TnD.dtype))
        y_TD = block(x_TD).to(x_TnD.dtype)
        return mhc_expand(x_TnD, y_TD, mixes.post_Tn, mixes.comb_Tnn).to(x_TnD.dtype)


@dataclass(frozen=True, slots=True)
class HyperHead:
    """The streams of a token as one hidden state, before the output norm."""

    config: MhcConfig
    fn_nX: torch.Tensor
    base_n: torch.Tensor
    scale_1: torch.Tensor

    @classmethod
    def load(cls, reader: WeightReader, config: MhcConfig) -> HyperHead:
        """Read `hc_head_fn`, `hc_head_base` and `hc_head_scale`."""
        n = config.count
        return cls(
            config=config,
            fn_nX=reader.tensor("hc_head_fn", (n, config.width)).float(),
            base_n=reader.tensor("hc_head_base", (n,)).float(),
            scale_1=reader.tensor("hc_head_scale", (1,)).float(),
        )

    def __call__(self, x_TnD: torch.Tensor) -> torch.Tensor:
        """[T, D] of the type of the streams."""
        c = self.config
        pre_Tn = mhc_head(
            x_TnD, self.fn_nX, self.base_n, self.scale_1, norm_eps=c.norm_eps, hc_eps=c.hc_eps
        )
        return mhc_collapse(x_TnD, pre_Tn).to(x_TnD.dtype)
