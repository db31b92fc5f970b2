"""DeepSeek-V4.1-Flash: caches shared by several layers, single-pass mHC, Engram."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.mhc import mhc_collapse
from services.common.checkpoint import Checkpoint
from services.common.ngram_table import TableLayout, find_tables
from services.engine.cache.spec import CacheGroup, CacheTensor
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.context import STATE_GROUP
from services.engine.layers.deepseek.context import WINDOW_GROUP, DeepseekContextMaker
from services.engine.layers.deepseek41.context import SharingContext, SharingContextMaker
from services.engine.layers.deepseek41.handoff import Receive, Send
from services.engine.layers.deepseek41.source import ENTRY_GROUPS, QUANTISED, CacheForms
from services.engine.layers.deepseek41.streams import first_weights
from services.engine.layers.embedding import OutputHead, TokenEmbedding
from services.engine.layers.norm import RmsNorm
from services.engine.layers.vision.deepseek import DeepseekVision
from services.engine.models.base import Collectives, NgramHash, Shard
from services.engine.models.deepseek_v41_config import DeepseekV41Config, parse_config
from services.engine.models.deepseek_v41_draft import load_draft
from services.engine.models.deepseek_v41_layer import Layer, LayerParts
from services.engine.models.ngram import ngram_hashes
from services.engine.models.stage import DecoderLayer, Stage, StageParts, load_weights
from services.engine.runtime.batch import StepBatch

# Legend: T packed tokens, N rows that need logits, n streams, D hidden, X = n * D.

WINDOW_PAGE_TOKENS = 32
ENTRY_PAGE_TOKENS = 64
# The tables: checked by `find_tables` and served from elsewhere.
_TABLES = re.compile(r"^layers\.\d+\.engram\.embed\.(weight|scale)$")
_DRAFT = re.compile(r"^mtp\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class _Entry:
    """Every stream starts as the embedding; the weights of the first collapse lie behind them."""

    embedding: TokenEmbedding
    streams: int

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        x_TD = self.embedding(batch)
        pre_Tn = first_weights(x_TD.shape[0], self.streams, x_TD.device)
        return torch.cat([x_TD.repeat(1, self.streams), pre_Tn], dim=1)


@dataclass(frozen=True, slots=True)
class _Exit:
    """The weights that the last layer has made collapse the streams."""

    streams: int
    dtype: torch.dtype
    norm: RmsNorm
    head: OutputHead

    def __call__(self, hidden_NZ: torch.Tensor) -> torch.Tensor:
        x_NX, pre_Nn = hidden_NZ[:, : -self.streams], hidden_NZ[:, -self.streams :]
        x_NnD = x_NX.unflatten(1, (self.streams, -1))
        return self.head(self.norm(mhc_collapse(x_NnD, pre_Nn).to(self.dtype)))


def load(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    shard: Shard,
    collectives: Collectives,
    quantised_cache: bool = False,
) -> Stage[SharingContext]:
    """Check every tensor against the config, then read the part that `shard` names.

    `quantised_cache` stores cache rows as the model was trained with them (e4m3 windows, e2m1
    entries and index keys) instead of in `compute_dtype`. Between stages the hidden state is as
    `deepseek41.handoff` lays it out; any cut is legal.
    """
    config = parse_config(checkpoint.config, QUANTISED if quantised_cache else CacheForms())
    tables = {t.layer: t for t in find_tables(checkpoint)}
    parts = LayerParts(compute_dtype, collectives, {i: t.name for i, t in tables.items()})
    drafts = _draft_stages(checkpoint)
    weights = load_weights(
        checkpoint,
        device=device,
        shard=shard,
        layers=config.layers,
        ignored=(_TABLES,) if tables else (),
        read=lambda reader, held: _read(reader, config, parts, drafts, held),
    )
    return Stage(
        weights=weights,
        groups=cache_groups(weights.layers, config.window),
        vocab_size=config.vocab,
        max_positions=config.max_positions,
        context=SharingContextMaker(
            DeepseekContextMaker(
                ropes=config.ropes.to(device), window=config.window, ratios=tuple(ENTRY_GROUPS)
            )
        ),
        ngrams=_hashes(checkpoint, tables, weights.held),
    )


def _draft_stages(checkpoint: Checkpoint) -> int:
    """Namespaces `mtp.<i>` of the checkpoint; what the config says of them is not relied on."""
    found = [int(m[1]) for name in checkpoint.names() if (m := _DRAFT.match(name))]
    return max(found, default=-1) + 1


def _hashes(
    checkpoint: Checkpoint, tables: Mapping[int, TableLayout], held: range
) -> tuple[NgramHash, ...]:
    return ngram_hashes(checkpoint, [t for layer, t in tables.items() if layer in held])


def _read(
    reader: WeightReader,
    config: DeepseekV41Config,
    parts: LayerParts,
    drafts: int,
    held: range,
) -> StageParts[SharingContext]:
    """The layers of `held`, the embedding with the first of them, head and draft with the last."""
    sizes, streams = (config.vocab, config.hidden, parts.collectives), config.streams
    entry = exit_ = draft = vision = None
    if held.start == 0:
        entry = _Entry(TokenEmbedding.load(reader, "embed", *sizes), streams.count)
        if config.vision is not None:
            vision = DeepseekVision.load(reader, config.vision, parts.dtype)
    if held.stop == config.layers:
        norm = RmsNorm.load(reader, "norm", config.hidden, streams.norm_eps, zero_centred=False)
        head = OutputHead.load(reader, "head", *sizes)
        exit_ = _Exit(streams.count, parts.dtype, norm, head)
        draft = load_draft(reader, config, parts, drafts)
    layers: tuple[DecoderLayer[SharingContext], ...] = (
        Receive(config.cut(held.start), parts.dtype),
        *(Layer.load(reader.at(f"layers.{i}"), i, config, parts) for i in held),
        Send(config.cut(held.stop)),
    )
    return StageParts(layers, entry, exit_, draft, vision)


def cache_groups(
    layers: Sequence[DecoderLayer[SharingContext]], window: int
) -> tuple[CacheGroup, ...]:
    """The groups of a stage: only those for which its layers keep something."""
    tensors: dict[str, tuple[CacheTensor, ...]] = {}
    for layer in layers:
        for group, more in layer.cache_tensors().items():
            tensors[group] = tensors.get(group, ()) + more
    groups = []
    if kept := tensors.get(WINDOW_GROUP):
        page = WINDOW_PAGE_TOKENS
        groups.append(
            CacheGroup(WINDOW_GROUP, "window", kept, page_tokens=page, window_tokens=window)
        )
    for ratio, name in ENTRY_GROUPS.items():
        if kept := tensors.get(name):
            page = ENTRY_PAGE_TOKENS
            groups.append(CacheGroup(name, "paged", kept, page_tokens=page, stride=ratio))
    if kept := tensors.get(STATE_GROUP):
        groups.append(CacheGroup(STATE_GROUP, "state", kept))
    return tuple(groups)
