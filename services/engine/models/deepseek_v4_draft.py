"""Draft weights of DeepSeek-V4: the layer of Preview and the DSpark stages of later releases."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.deepseek.streams import HyperHead
from services.engine.layers.linear import Linear
from services.engine.layers.norm import RmsNorm
from services.engine.models.deepseek_v4_config import DeepseekV4Config, DsparkConfig
from services.engine.models.deepseek_v4_layer import Layer, LayerParts

# Legend: V vocabulary, K rank of the Markov head.


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """One draft layer of Preview; embedding and head are those of the model."""

    embedding_norm: RmsNorm
    stream_norm: RmsNorm
    embedding: Linear
    stream: Linear
    layer: Layer
    collapse: HyperHead
    norm: RmsNorm

    @classmethod
    def load(cls, reader: WeightReader, config: DeepseekV4Config, parts: LayerParts) -> MtpLayer:
        square = (config.hidden, config.hidden)
        return cls(
            embedding_norm=_norm(reader, "enorm", config),
            stream_norm=_norm(reader, "hnorm", config),
            embedding=Linear.replicated(reader, "e_proj", square),
            stream=Linear.replicated(reader, "h_proj", square),
            layer=Layer.load(reader, "mtp.0", config, config.moe, parts),
            collapse=HyperHead.load(reader, config.streams),
            norm=_norm(reader, "norm", config),
        )


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """Adds to a token's logits what the token before it makes likely; and the confidence."""

    before_VK: torch.Tensor
    after: Linear  # [V, K]
    confidence: Linear  # [1, hidden + K]

    @classmethod
    def load(cls, reader: WeightReader, config: DeepseekV4Config, rank: int) -> MarkovHead:
        markov, shape = reader.at("markov_head"), (config.vocab, rank)
        return cls(
            before_VK=markov.tensor("markov_w1.weight", shape),
            after=Linear.replicated(markov, "markov_w2", shape),
            confidence=Linear.replicated(reader, "confidence_head.proj", (1, config.hidden + rank)),
        )


@dataclass(frozen=True, slots=True)
class DsparkDraft:
    """The stages of a block draft: input projection with the first, heads with the last."""

    config: DsparkConfig
    main: Linear
    main_norm: RmsNorm
    stages: tuple[Layer, ...]
    collapse: HyperHead
    norm: RmsNorm
    markov: MarkovHead

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        config: DeepseekV4Config,
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
                Layer.load(reader.at(str(i)), f"mtp.{i}", config, dspark.moe, parts)
                for i in range(stages)
            ),
            collapse=HyperHead.load(last, config.streams),
            norm=_norm(last, "norm", config),
            markov=MarkovHead.load(last, config, dspark.markov_rank),
        )


def load_draft(
    reader: WeightReader, config: DeepseekV4Config, parts: LayerParts
) -> MtpLayer | DsparkDraft | None:
    """The draft of a checkpoint, None where it has none.

    The number of DSpark stages is that of the namespaces `mtp.0`, `mtp.1` and so on, since
    num_nextn_predict_layers of released checkpoints does not say it.
    """
    stages = 0
    while reader.has(f"mtp.{stages}.attn_norm.weight"):
        stages += 1
    if not stages:
        return None
    if config.dspark is not None:
        return DsparkDraft.load(reader.at("mtp"), config, config.dspark, stages, parts)
    return MtpLayer.load(reader.at("mtp.0"), config, parts)


def _norm(reader: WeightReader, name: str, config: DeepseekV4Config) -> RmsNorm:
    eps = config.streams.norm_eps
    return RmsNorm.load(reader, name, config.hidden, eps, zero_centred=False)
