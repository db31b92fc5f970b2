"""Draft weights of DeepSeek-V4: the layer of Preview and the DSpark stages of later releases."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.deepseek.streams import HyperHead
from services.engine.layers.linear import Linear
from services.engine.layers.norm import RmsNorm
from services.engine.models.deepseek_draft import DraftSizes, DsparkDraft
from services.engine.models.deepseek_v4_config import DeepseekV4Config
from services.engine.models.deepseek_v4_layer import Layer, LayerParts


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
        square, sizes = (config.hidden, config.hidden), _sizes(config)
        return cls(
            embedding_norm=sizes.norm(reader, "enorm"),
            stream_norm=sizes.norm(reader, "hnorm"),
            embedding=Linear.replicated(reader, "e_proj", square),
            stream=Linear.replicated(reader, "h_proj", square),
            layer=Layer.load(reader, "mtp.0", config, config.moe, parts),
            collapse=HyperHead.load(reader, config.streams),
            norm=sizes.norm(reader, "norm"),
        )


def load_draft(
    reader: WeightReader, config: DeepseekV4Config, parts: LayerParts
) -> MtpLayer | DsparkDraft[Layer] | None:
    """The draft of a checkpoint, None where it has none.

    The number of DSpark stages is that of the namespaces `mtp.0`, `mtp.1` and so on, since
    num_nextn_predict_layers of released checkpoints does not say it.
    """
    stages = 0
    while reader.has(f"mtp.{stages}.attn_norm.weight"):
        stages += 1
    if not stages:
        return None
    dspark, sizes = config.dspark, _sizes(config)
    if dspark is None:
        return MtpLayer.load(reader.at("mtp.0"), config, parts)
    return DsparkDraft.load(
        reader.at("mtp"),
        sizes,
        dspark,
        stages,
        lambda stage, name: Layer.load(stage, name, config, dspark.moe, parts),
        lambda last: HyperHead.load(last, config.streams),
    )


def _sizes(config: DeepseekV4Config) -> DraftSizes:
    eps = config.streams.norm_eps
    return DraftSizes(config.vocab, config.hidden, eps, before="markov_w1", after="markov_w2")
