"""A slice of a decoder's layers: how every family loads one and runs it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from services.common.checkpoint import Checkpoint, CheckpointError
from services.engine.cache.spec import CacheGroup, CachePools, CacheTensor
from services.engine.checkpoints.loader import WeightReader, make_readers, refuse_surplus
from services.engine.models.base import NgramHash, Shard, VisionModel
from services.engine.runtime.batch import StepBatch

# Legend: T packed tokens, N rows that need logits, X width of the residual.

C = TypeVar("C")  # what the layers of a family share during one forward pass
C_contra = TypeVar("C_contra", contravariant=True)


class DecoderLayer(Protocol[C_contra]):
    """One layer: residual fp32 [T, X] to residual fp32 [T, X]."""

    def __call__(self, hidden_TX: torch.Tensor, ctx: C_contra, /) -> torch.Tensor: ...

    def cache_tensors(self) -> Mapping[str, tuple[CacheTensor, ...]]:
        """Cache tensors by group name."""
        ...


class Entry(Protocol):
    """Tokens of a batch, images among them, to the first residual fp32 [T, X]."""

    def __call__(self, batch: StepBatch, /) -> torch.Tensor: ...


class Exit(Protocol):
    """The last residual of some rows, fp32 [N, X], to fp32 logits [N, vocab]."""

    def __call__(self, hidden_NX: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StageParts(Generic[C]):
    """The modules of a slice of layers."""

    layers: tuple[DecoderLayer[C], ...]
    entry: Entry | None  # on the first stage
    exit: Exit | None  # on the last stage
    draft: object | None = None  # draft layers, on the last stage
    vision: VisionModel | None = None  # on the first stage


@dataclass(frozen=True, slots=True)
class StageWeights(Generic[C]):
    """Loaded modules, the layers that they are, and the bytes they take."""

    parts: StageParts[C]
    held: range
    nbytes: int

    @property
    def layers(self) -> tuple[DecoderLayer[C], ...]:
        """The layers of `held`."""
        return self.parts.layers


def load_weights(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    shard: Shard,
    layers: int,
    read: Callable[[WeightReader, range], StageParts[C]],
    ignored: Iterable[re.Pattern[str]] = (),
) -> StageWeights[C]:
    """Check every tensor against the config, then read the part that `shard` names.

    `read` builds the modules of a range of layers from a reader, be it one that only checks.
    `ignored` matches the names of tensors that the family leaves out. On the meta device nothing
    is read: the modules hold no weights and serve for what depends on sizes alone.
    Raises CheckpointError for a tensor that is missing, misshaped or has no place.
    """
    checking, reading = make_readers(checkpoint, device, shard)
    read(checking, range(layers))
    refuse_surplus(checkpoint, checking.names, ignored)
    held = layer_range(shard, layers)
    parts = read(checking if device.type == "meta" else reading, held)
    return StageWeights(parts, held, reading.nbytes)


@dataclass(slots=True)
class Stage(Generic[C]):
    """A slice of a decoder's layers, with the embedding and the head where it holds them.

    Implements `StageModel`. The hidden state between stages is the residual, fp32 [T, X].
    """

    weights: StageWeights[C]
    groups: tuple[CacheGroup, ...]
    vocab_size: int
    max_positions: int
    context: Callable[[StepBatch, CachePools], C]
    ngrams: tuple[NgramHash, ...] = ()  # of the n-gram layers that it holds

    @property
    def weight_bytes(self) -> int:
        """Resident bytes of all weights of this shard."""
        return self.weights.nbytes

    @property
    def vision(self) -> VisionModel | None:
        """The vision tower, on the first stage."""
        return self.weights.parts.vision

    @torch.inference_mode()
    def forward(
        self, batch: StepBatch, pools: CachePools, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `StageModel.forward`. `hidden` is needed on every stage but the first."""
        parts = self.weights.parts
        if parts.entry is not None:
            hidden = parts.entry(batch)
        if hidden is None:
            raise ValueError("a stage that is not the first needs the hidden state before it")
        ctx = self.context(batch, pools)
        for layer in parts.layers:
            hidden = layer(hidden, ctx)
        if parts.exit is None:
            return hidden
        return parts.exit(hidden.index_select(0, batch.logit_rows_N))


def layer_range(shard: Shard, layers: int) -> range:
    """The layers of this stage; CheckpointError where the shard asks for others."""
    last = layers if shard.last_layer is None else shard.last_layer
    if not 0 <= shard.first_layer <= last <= layers:
        raise CheckpointError(
            f"layers {shard.first_layer}..{last} asked for, the model has 0..{layers}"
        )
    return range(shard.first_layer, last)
