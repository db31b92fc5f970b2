"""N-gram embedding layer: table rows gate into every residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.causal_conv import causal_conv, history
from kernels.ple import ple_gate
from kernels.quant_linear import decode_e4m3
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.context import StepContext
from services.engine.layers.hyper_connection import HyperConfig
from services.engine.layers.linear import Linear
from services.engine.layers.norm import RmsNorm

# Legend: T tokens, C streams, H hidden, X = C * H, E embedding values of a token.


@dataclass(frozen=True, slots=True)
class PleConfig:
    """`embed` values per token from the table; a convolution of `taps` taps at `dilation`."""

    streams: HyperConfig
    embed: int
    taps: int
    dilation: int

    @property
    def window(self) -> int:
        """Tokens of convolution state."""
        return (self.taps - 1) * self.dilation


@dataclass(frozen=True, slots=True)
class PleLayer:
    """Adds gated n-gram values and their convolution to the streams. On every rank whole."""

    name: str  # of its state tensor
    config: PleConfig
    table: str  # name of the n-gram table
    table_scale: float
    key: Linear
    value: Linear
    norm_key: RmsNorm
    norm_query: RmsNorm
    norm_conv: RmsNorm
    conv_XJ: torch.Tensor

    @classmethod
    def load(
        cls, reader: WeightReader, name: str, config: PleConfig, table: str, table_scale: float
    ) -> PleLayer:
        streams = config.streams
        width, hidden = streams.width, streams.hidden

        def norm(which: str) -> RmsNorm:
            return RmsNorm.load(reader, which, width, streams.eps, group_size=hidden)

        return cls(
            name=name,
            config=config,
            table=table,
            table_scale=table_scale,
            key=Linear.replicated(reader, "key_proj", (width, config.embed)),
            value=Linear.replicated(reader, "value_proj", (hidden, config.embed)),
            norm_key=norm("norm_key"),
            norm_query=norm("norm_query"),
            norm_conv=norm("norm_conv"),
            conv_XJ=reader.tensor("conv1d.weight", (width, 1, config.taps)).squeeze(),
        )

    def state_tensors(self, dtype: torch.dtype) -> tuple[CacheTensor, ...]:
        """What one slot of the state group holds for this layer."""
        shape = (self.config.window, self.config.streams.width)
        return (CacheTensor(f"{self.name}.ple", shape, dtype),)

    def __call__(
        self, streams_TX: torch.Tensor, ctx: StepContext, dtype: torch.dtype
    ) -> torch.Tensor:
        """fp32 [T, X]; waits for the table rows of the batch."""
        e_TE = self._values(ctx.ngram_rows(self.table)).to(dtype)
        key = self.norm_key(self.key(e_TE), torch.float32)
        query = self.norm_query(streams_TX)
        value = self.value(e_TE, torch.float32)
        gated_TX = ple_gate(key, query, value, self.config.streams.count)
        normed_TX = self.norm_conv(gated_TX, dtype)
        c = self.config
        past = history(normed_TX, ctx.read_state(f"{self.name}.ple"))
        ctx.write_window(f"{self.name}.ple", past, c.window)
        conv_TX = causal_conv(past, ctx.history_rows(c.window, c.dilation), self.conv_XJ)
        return streams_TX + gated_TX + conv_TX.float()

    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        """fp32 values of rows as stored: e4m3 codes (uint8) or a float type, times the scale."""
        values = decode_e4m3(rows) if rows.dtype == torch.uint8 else rows.float()
        return values * self.table_scale
