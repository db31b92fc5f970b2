"""DSpark stages of DeepSeek-V4.1: loaded and checked with the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.linear import Linear
from services.engine.layers.norm import RmsNorm
from services.engine.models.deepseek_v4_config import DsparkConfig
from services.engine.models.deepseek_v41_config import DeepseekV41Config
from services.engine.models.deepseek_v41_layer import Layer, LayerParts

# Legend: V vocabulary, K rank of the Markov head.


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """Adds to a token's logits what the token before it makes likely; and the confidence."""

    before_VK: torch.Tensor
    after: Linear  # [V, K]
    confidence: Linear  # [1, hidden + K]

    @classmethod
    def load(cls, reader: WeightReader, config: DeepseekV41Config, rank: int) -> MarkovHead:
        markov, shape = reader.at("markov_head"), (config.vocab, rank)
        return cls(
            before_VK=markov.tensor("embed.weight", shape),
            after=Linear.replicated(markov, "head", shape),
            confidence=Linear.replicated(reader, "confidence_head.proj", (1, config.hidden + rank)),
        )


@dataclass(frozen=True, slots=True)
class DsparkDraft:
    """The stages of a block draft: input projection with the first, heads with the last.

    Embedding and head are those of the model; the collapse before the head takes the weights that
    the last stage's experts have made.
    """

    config: DsparkConfig
    main: Linear
    main_norm: RmsNorm
    stages: tuple[Layer, ...]
    norm: RmsNorm
    markov: MarkovHead

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        config: DeepseekV41Config,
        dspark: DsparkConfig,
        stages: int,
        parts: LayerParts,
    ) -> DsparkDraft:
        """`reader` at `mtp`, whose namespaces 0 to `stages` - 1 are the stages."""
        first, last = reader.at("0"), reader.at(str(stages - 1))
        main = (config.hidden, len(dspark.targets) * config.hidden)
        return cls(
            config=dspark,
            main=Linear.replicated(first, "main_proj", main),
            main_norm=_norm(first, "main_norm", config),
            stages=tuple(
                Layer.draft(reader.at(str(i)), f"mtp.{i}", config, dspark.moe, parts)
                for i in range(stages)
            ),
            norm=_norm(last, "norm", config),
            markov=MarkovHead.load(last, config, dspark.markov_rank),
        )


def load_draft(
    reader: WeightReader, config: DeepseekV41Config, parts: LayerParts, stages: int
) -> DsparkDraft | None:
    """The draft of a checkpoint with `stages` namespaces `mtp.<i>`, None where it has none."""
    if config.dspark is None or not stages:
        return None
    return DsparkDraft.load(reader.at("mtp"), config, config.dspark, stages, parts)


def _norm(reader: WeightReader, name: str, config: DeepseekV41Config) -> RmsNorm:
    eps = config.streams.norm_eps
    return RmsNorm.load(reader, name, config.hidden, eps, zero_centred=False)
