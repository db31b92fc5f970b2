"""Gated hyper-connection around one block, and the final mixer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.hyper_connection import hyper_read, hyper_write
from kernels.quant_linear import Matrix
from services.engine.checkpoints.loader import WeightReader

# Legend: T tokens, C streams, H hidden, X = C * H.


@dataclass(frozen=True, slots=True)
class HyperConfig:
    """`count` streams of width `hidden`, mixed through `low_rank` values."""

    hidden: int
    count: int
    low_rank: int
    eps: float

    @property
    def width(self) -> int:
        """Values of all streams of a token."""
        return self.hidden * self.count


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """Reads a block's input from the streams and adds its output to them. On every rank whole."""

    config: HyperConfig
    norm_X: torch.Tensor
    down: Matrix
    up: Matrix
    inject: Matrix | None  # None in the final mixer

    @classmethod
    def load(
        cls, reader: WeightReader, config: HyperConfig, *, injects: bool = True
    ) -> HyperConnection:
        width, low = config.width, config.low_rank
        inject = reader.matrix("block_inject_weight", (config.count, width)) if injects else None
        return cls(
            config=config,
            norm_X=reader.tensor("hc_norm.weight", (width,)),
            down=reader.matrix("input_mix_weight_down", (low, width)),
            up=reader.matrix("input_mix_weight_up", (width, low)),
            inject=inject,
        )

    def read(self, streams_TX: torch.Tensor) -> torch.Tensor:
        """The mixed input fp32 [T, H]."""
        return self._read(streams_TX)[0]

    def around(
        self,
        streams_TX: torch.Tensor,
        block: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The streams fp32 [T, X] after `block`, which maps [T, H] of `dtype` to [T, H]."""
        x_TH, inject_TC = self._read(streams_TX)
        assert inject_TC is not None
        return hyper_write(streams_TX, block(x_TH.to(dtype)), inject_TC)

    def _read(self, streams_TX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        c = self.config
        return hyper_read(
            streams_TX, self.norm_X, self.down, self.up, self.inject, count=c.count, eps=c.eps
        )
