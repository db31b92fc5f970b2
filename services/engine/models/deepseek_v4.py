"""DeepSeek-V4: window, compressed and heavily compressed attention on mixed residual streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.common.checkpoint import Checkpoint
from services.engine.cache.spec import CacheGroup, CacheTensor
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.context import STATE_GROUP
from services.engine.layers.deepseek.attention import (
    CSA_GROUP,
    CSA_RATIO,
    HCA_GROUP,
    HCA_RATIO,
)
from services.engine.layers.deepseek.context import (
    WINDOW_GROUP,
    DeepseekContext,
    DeepseekContextMaker,
)
from services.engine.layers.deepseek.indexer import INDEX_GROUP
from services.engine.layers.deepseek.streams import HyperHead
from services.engine.layers.embedding import OutputHead, StreamEntry, TokenEmbedding
from services.engine.layers.norm import RmsNorm
from services.engine.layers.vision.deepseek import DeepseekVision
from services.engine.models.base import Collectives, Shard
from services.engine.models.deepseek_v4_config import DeepseekV4Config, parse_config
from services.engine.models.deepseek_v4_draft import load_draft
from services.engine.models.deepseek_v4_layer import Layer, LayerParts
from services.engine.models.stage import Stage, StageParts, load_weights

# Legend: T packed tokens, N rows that need logits, n streams, D hidden, X = n * D.

WINDOW_PAGE_TOKENS = 64
ENTRY_PAGE_TOKENS = 128  # one HCA entry, 32 CSA entries
_STRIDES = {CSA_GROUP: CSA_RATIO, INDEX_GROUP: CSA_RATIO, HCA_GROUP: HCA_RATIO}


@dataclass(frozen=True, slots=True)
class _Exit:
    streams: int
    collapse: HyperHead
    norm: RmsNorm
    head: OutputHead

    def __call__(self, hidden_NX: torch.Tensor) -> torch.Tensor:
        x_NnD = hidden_NX.unflatten(1, (self.streams, -1))
        return self.head(self.norm(self.collapse(x_NnD)))


def load(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    shard: Shard,
    collectives: Collectives,
    quantised_cache: bool = False,
) -> Stage[DeepseekContext]:
    """Check every tensor against the config, then read the part that `shard` names.

    `quantised_cache` stores cache rows in few bits, as the model was trained with them, instead
    of in `compute_dtype`. The hidden state between stages is the streams [T, X] in
    `compute_dtype`, in which they are kept between sublayers.
    """
    config = parse_config(checkpoint.config, quantised_cache=quantised_cache)
    parts = LayerParts(compute_dtype, collectives)
    weights = load_weights(
        checkpoint,
        device=device,
        shard=shard,
        layers=config.layers,
        read=lambda reader, held: _read(reader, config, parts, held),
    )
    held = {config.ratios[i] for i in weights.held}
    return Stage(
        weights=weights,
        groups=cache_groups(config, weights.held, compute_dtype),
        vocab_size=config.vocab,
        max_positions=config.max_positions,
        context=DeepseekContextMaker(
            ropes=config.ropes.to(device),
            window=config.window,
            ratios=tuple(sorted(held - {0})),
            two_sided_images=config.vision is not None,
        ),
    )


def _read(
    reader: WeightReader, config: DeepseekV4Config, parts: LayerParts, held: range
) -> StageParts[DeepseekContext]:
    """The layers of `held`, the embedding with the first of them, head and draft with the last."""
    sizes = (config.vocab, config.hidden, parts.collectives)
    layers = tuple(_layer(reader, i, config, parts) for i in held)
    entry = exit_ = draft = vision = None
    if held.start == 0:
        embedding = TokenEmbedding.load(reader, "embed", *sizes)
        entry = StreamEntry(embedding, config.streams.count, parts.dtype)
        if config.vision is not None:
            vision = DeepseekVision.load(reader, config.vision, parts.dtype)
    if held.stop == config.layers:
        eps = config.streams.norm_eps
        exit_ = _Exit(
            streams=config.streams.count,
            collapse=HyperHead.load(reader, config.streams),
            norm=RmsNorm.load(reader, "norm", config.hidden, eps, zero_centred=False),
            head=OutputHead.load(reader, "head", *sizes),
        )
        draft = load_draft(reader, config, parts)
    return StageParts(layers, entry, exit_, draft, vision)


def _layer(reader: WeightReader, index: int, config: DeepseekV4Config, parts: LayerParts) -> Layer:
    return Layer.load(
        reader.at(f"layers.{index}"),
        f"layers.{index}",
        config,
        config.moe,
        parts,
        ratio=config.ratios[index],
        hashed=index < config.hash_layers,
    )


def cache_groups(
    config: DeepseekV4Config, held: range, dtype: torch.dtype
) -> tuple[CacheGroup, ...]:
    """The groups of a stage of layers `held`: only those for which they keep something."""
    tensors: dict[str, tuple[CacheTensor, ...]] = {}
    for index in held:
        name, ratio = f"layers.{index}", config.ratios[index]
        for group, more in config.attention.cache_tensors(name, ratio, dtype).items():
            tensors[group] = tensors.get(group, ()) + more
    return tuple(_group(name, kept, config.window) for name, kept in tensors.items())


def _group(name: str, tensors: tuple[CacheTensor, ...], window: int) -> CacheGroup:
    if name == WINDOW_GROUP:
        page = WINDOW_PAGE_TOKENS
        return CacheGroup(name, "window", tensors, page_tokens=page, window_tokens=window)
    if name == STATE_GROUP:
        return CacheGroup(name, "state", tensors)
    page, stride = ENTRY_PAGE_TOKENS, _STRIDES[name]
    return CacheGroup(name, "paged", tensors, page_tokens=page, stride=stride)
