"""One layer of DeepSeek-V4: latent attention, then experts, each inside hyper-connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.deepseek.attention import LatentAttention
from services.engine.layers.deepseek.context import DeepseekContext
from services.engine.layers.deepseek.moe import DeepseekMoe, DeepseekMoeConfig
from services.engine.layers.deepseek.streams import Sublayer
from services.engine.models.base import Collectives
from services.engine.models.deepseek_v4_config import DeepseekV4Config

# Legend: T packed tokens, n streams, D hidden, X = n * D.


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What loading a layer needs besides its weights and sizes."""

    dtype: torch.dtype
    collectives: Collectives


@dataclass(frozen=True, slots=True)
class Layer:
    """Streams [T, X] of the compute type to the same."""

    dtype: torch.dtype
    ratio: int
    streams: int
    attn_streams: Sublayer
    attn: LatentAttention
    ffn_streams: Sublayer
    ffn: DeepseekMoe

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        name: str,
        config: DeepseekV4Config,
        moe: DeepseekMoeConfig,
        parts: LayerParts,
        *,
        ratio: int = 0,
        hashed: bool = False,
    ) -> Layer:
        """The layer at `reader`; `name` is that of its cache tensors."""
        sum_ranks = parts.collectives
        return cls(
            dtype=parts.dtype,
            ratio=ratio,
            streams=config.streams.count,
            attn_streams=Sublayer.load(reader, "attn", config.streams),
            attn=LatentAttention.load(reader.at("attn"), name, config.attention, ratio, sum_ranks),
            ffn_streams=Sublayer.load(reader, "ffn", config.streams),
            ffn=DeepseekMoe.load(reader.at("ffn"), moe, sum_ranks, hashed=hashed),
        )

    def __call__(self, hidden_TX: torch.Tensor, ctx: DeepseekContext) -> torch.Tensor:
        x_TnD = hidden_TX.unflatten(1, (self.streams, -1))
        x_TnD = self.attn_streams.around(x_TnD, lambda x: self.attn(x, ctx))
        x_TnD = self.ffn_streams.around(x_TnD, lambda x: self.ffn(x, ctx))
        return x_TnD.flatten(1)

    def cache_tensors(self) -> Mapping[str, tuple[CacheTensor, ...]]:
        return self.attn.config.cache_tensors(self.attn.name, self.ratio, self.dtype)
