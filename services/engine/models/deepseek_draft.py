"""The DSpark stages of DeepSeek V4 and V4.1: a block draft, loaded and checked with the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.deepseek.streams import HyperHead
from services.engine.layers.linear import Linear
from services.engine.layers.norm import RmsNorm
from services.engine.models.deepseek_v4_config import DsparkConfig

# Legend: V vocabulary, K rank of the Markov head.

L = TypeVar("L")  # the family's layer


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Sizes of the model that its draft shares; `before` and `after` name the Markov matrices."""

    vocab: int
    hidden: int
    eps: float
    before: str
    after: str

    def norm(self, reader: WeightReader, name: str) -> RmsNorm:
        """A norm over the hidden size."""
        return RmsNorm.load(reader, name, self.hidden, self.eps, zero_centred=False)


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """Adds to a token's logits what the token before it makes likely; and the confidence."""

    before_VK: torch.Tensor
    after: Linear  # [V, K]
    confidence: Linear  # [1, hidden + K]

    @classmethod
    def load(cls, reader: WeightReader, sizes: DraftSizes, rank: int) -> MarkovHead:
        markov, shape = reader.at("markov_head"), (sizes.vocab, rank)
        return cls(
            before_VK=markov.tensor(f"{sizes.before}.weight", shape),
            after=Linear.replicated(markov, sizes.after, shape),
            confidence=Linear.replicated(reader, "confidence_head.proj", (1, sizes.hidden + rank)),
        )


@dataclass(frozen=True, slots=True)
class DsparkDraft(Generic[L]):
    """The stages of a block draft: input projection with the first, heads with the last.

    Embedding and head are those of the model. `collapse` is None in V4.1, where the weights that
    the last stage's experts have made collapse the streams.
    """

    config: DsparkConfig
    main: Linear
    main_norm: RmsNorm
    stages: tuple[L, ...]
    collapse: HyperHead | None
    norm: RmsNorm
    markov: MarkovHead

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        sizes: DraftSizes,
        config: DsparkConfig,
        stages: int,
        load_stage: Callable[[WeightReader, str], L],
        load_collapse: Callable[[WeightReader], HyperHead] | None = None,
    ) -> DsparkDraft[L]:
        """`reader` at `mtp`, whose namespaces 0 to `stages` - 1 are the stages.

        `load_stage` gets a reader at a stage and the name of its cache tensors.
        """
        first, last = reader.at("0"), reader.at(str(stages - 1))
        main = (sizes.hidden, len(config.targets) * sizes.hidden)
        return cls(
            config=config,
            main=Linear.replicated(first, "main_proj", main),
            main_norm=sizes.norm(first, "main_norm"),
            stages=tuple(load_stage(reader.at(str(i)), f"mtp.{i}") for i in range(stages)),
            collapse=load_collapse(last) if load_collapse is not None else None,
            norm=sizes.norm(last, "norm"),
            markov=MarkovHead.load(last, sizes, config.markov_rank),
        )
