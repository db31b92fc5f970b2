"""DSpark stages of DeepSeek-V4.1: loaded and checked with the model."""

from __future__ import annotations

from services.engine.checkpoints.loader import WeightReader
from services.engine.models.deepseek_draft import DraftSizes, DsparkDraft
from services.engine.models.deepseek_v41_config import DeepseekV41Config
from services.engine.models.deepseek_v41_layer import Layer, LayerParts


def load_draft(
    reader: WeightReader, config: DeepseekV41Config, parts: LayerParts, stages: int
) -> DsparkDraft[Layer] | None:
    """The draft of a checkpoint with `stages` namespaces `mtp.<i>`, None where it has none."""
    dspark = config.dspark
    if dspark is None or not stages:
        return None
    sizes = DraftSizes(
        config.vocab, config.hidden, config.streams.norm_eps, before="embed", after="head"
    )
    return DsparkDraft.load(
        reader.at("mtp"),
        sizes,
        dspark,
        stages,
        lambda stage, name: Layer.draft(stage, name, config, dspark.moe, parts),
    )
