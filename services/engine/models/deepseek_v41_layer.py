"""One layer of DeepSeek-V4.1: Engram where it has one, latent attention, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from services.common.checkpoint import CheckpointError
from services.engine.cache.spec import CacheTensor
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.deepseek.moe import DeepseekMoe, DeepseekMoeConfig
from services.engine.layers.deepseek41.attention import AttentionRole, SharedAttention
from services.engine.layers.deepseek41.context import SharingContext
from services.engine.layers.deepseek41.engram import EngramLayer
from services.engine.layers.deepseek41.streams import SinglePassSublayer
from services.engine.models.base import Collectives
from services.engine.models.deepseek_v41_config import DeepseekV41Config

# Legend: T packed tokens, n streams, D hidden, X = n * D.


_IMAGE_BIAS = "ffn.gate.bias_vl"


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What loading a layer needs besides its weights and sizes; table names by layer."""

    dtype: torch.dtype
    collectives: Collectives
    tables: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Layer:
    """Streams [T, X] of the compute type to the same; collapse weights go through the context."""

    dtype: torch.dtype
    streams: int
    engram: EngramLayer | None
    attn_streams: SinglePassSublayer
    attn: SharedAttention
    ffn_streams: SinglePassSublayer
    ffn: DeepseekMoe

    @classmethod
    def load(
        cls, reader: WeightReader, index: int, config: DeepseekV41Config, parts: LayerParts
    ) -> Layer:
        """Layer `index` of the decoder, `reader` at it."""
        engram = None
        if config.engram is not None and index in config.engram_layers:
            engram = EngramLayer.load(reader.at("engram"), config.engram, parts.tables[index])
        role = config.role(index)
        return cls._load(reader, f"layers.{index}", config, config.moe, parts, role, engram)

    @classmethod
    def draft(
        cls,
        reader: WeightReader,
        name: str,
        config: DeepseekV41Config,
        moe: DeepseekMoeConfig,
        parts: LayerParts,
    ) -> Layer:
        """A draft stage: a window alone, and experts of its own sizes."""
        return cls._load(reader, name, config, moe, parts, AttentionRole(), None)

    @classmethod
    def _load(
        cls,
        reader: WeightReader,
        name: str,
        config: DeepseekV41Config,
        moe: DeepseekMoeConfig,
        parts: LayerParts,
        role: AttentionRole,
        engram: EngramLayer | None,
    ) -> Layer:
        sum_ranks = parts.collectives
        if config.vision is not None:
            _require(reader, _IMAGE_BIAS, moe.experts)
        return cls(
            dtype=parts.dtype,
            streams=config.streams.count,
            engram=engram,
            attn_streams=SinglePassSublayer.load(reader, "attn", config.streams),
            attn=SharedAttention.load(reader.at("attn"), name, config.attention, role, sum_ranks),
            ffn_streams=SinglePassSublayer.load(reader, "ffn", config.streams),
            ffn=DeepseekMoe.load(reader.at("ffn"), moe, sum_ranks, hashed=False),
        )

    def __call__(self, hidden_TX: torch.Tensor, ctx: SharingContext) -> torch.Tensor:
        x_TnD, carry = hidden_TX.unflatten(1, (self.streams, -1)), ctx.carry
        assert carry.pre_Tn is not None
        if self.engram is not None:
            x_TnD = self.engram(x_TnD, ctx)
        x_TnD, pre_Tn = self.attn_streams.around(x_TnD, carry.pre_Tn, lambda x: self.attn(x, ctx))
        x_TnD, carry.pre_Tn = self.ffn_streams.around(x_TnD, pre_Tn, lambda x: self.ffn(x, ctx))
        return x_TnD.flatten(1)

    def cache_tensors(self) -> Mapping[str, tuple[CacheTensor, ...]]:
        return self.attn.cache_tensors(self.dtype)


def _require(reader: WeightReader, name: str, size: int) -> None:
    """CheckpointError where a tensor that other models may lack is missing."""
    if not reader.has(name):
        raise CheckpointError(f"missing tensor of shape [{size}]", tensor=reader.full_name(name))
