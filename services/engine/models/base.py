"""What every model family offers to the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.engine.cache.spec import CacheGroup, CachePools
from services.engine.images import ImageSpan
from services.engine.runtime.batch import StepBatch


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model this process holds.

    `rank` of `world` tensor-parallel ranks; layers `first_layer` to `last_layer` (exclusive;
    None means to the end) of the sequence of layers.
    """

    rank: int = 0
    world: int = 1
    first_layer: int = 0
    last_layer: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} must be in 0..{self.world - 1}")


class Collectives(Protocol):
    """Sums over tensor-parallel ranks. A single rank uses `NoCollectives`."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor: ...


class NoCollectives:
    """One rank: nothing to sum."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x


class NgramHash(Protocol):
    """Row ids of an n-gram table from token ids alone."""

    table: str  # name of the table, as offload serves it
    context_tokens: int  # preceding ids that a token's rows depend on

    def row_ids(self, token_ids: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Row ids int64 [n, heads] of n consecutive tokens of one sequence.

        `context` holds up to `context_tokens` ids just before `token_ids` (fewer at the start).
        """
        ...


class VisionModel(Protocol):
    """Turns pixels into what replaces the embeddings of an image's placeholder tokens."""

    @property
    def atomic_spans(self) -> bool:
        """Whether the tokens of an image attend to each other in both directions.

        A span is then computed within one step, and no prefix hit ends inside one.
        """
        ...

    @property
    def rope_lag(self) -> int:
        """How many tokens in front of a token the position lies that rotates a compressed key
        which the token completes; 0 for models without such keys."""
        ...

    def span_tokens(self, height: int, width: int, offset: int) -> int:
        """Placeholder tokens of an image whose pixels are [height, width, 3].

        `offset` is the position of the first one. Raises ValueError where the sizes are not such
        that the tower takes them.
        """
        ...

    def embed(self, pixels_HW3: torch.Tensor, offset: int) -> torch.Tensor:
        """Embeddings [span_tokens, hidden] of one image, uint8 pixels on any device."""
        ...

    def rope_positions(
        self, images: Sequence[ImageSpan], start: int, count: int
    ) -> torch.Tensor | None:
        """Rotary positions int64 [count, 3] of `count` tokens from position `start` on.

        `images` are all images of the sequence. None for models whose rotary position is the
        token's position.
        """
        ...


class StageModel(Protocol):
    """The layers of one pipeline stage. Not thread-safe; one caller.

    `forward` returns the hidden state for the next stage ([T, width]) or, on the last stage,
    fp32 logits [N, vocab] of `batch.logit_rows_N`. It reads and writes `pools` in place and makes
    no host round trip.
    """

    @property
    def groups(self) -> tuple[CacheGroup, ...]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def ngrams(self) -> tuple[NgramHash, ...]:
        """Of the n-gram tables that this stage reads."""
        ...

    @property
    def vision(self) -> VisionModel | None:
        """On the first stage of a model that takes images."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Resident bytes of all weights of this shard."""
        ...

    def forward(
        self, batch: StepBatch, pools: CachePools, hidden: torch.Tensor | None = None
    ) -> torch.Tensor: ...
