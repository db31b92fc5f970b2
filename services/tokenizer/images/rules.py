"""What a checkpoint says about images: their sizes, their tokens, their mark in templates."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.errors import StartupError
from services.tokenizer.images.deepseek import (
    DeepSeekV4Layout,
    DeepSeekV4Sizing,
    DeepSeekV41Layout,
    DeepSeekV41Sizing,
)
from services.tokenizer.images.sizing import Sizing, SmartResize, TokenBudget
from services.tokenizer.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

# Published preprocessor_config.json of the Qwen3.8 and GLM-5.3 checkpoints, for folders without.
_QWEN_PIXELS = (65_536, 16_777_216)
_GLM_TOKENS = (16, 8000)
# Vision-Exp reserves its five ids 23 places below the end of the vocabulary (129257 of 129280).
_V4_FIRST_ID_FROM_END = 23

Config = Mapping[str, Any]


class Layout(Protocol):
    """The tokens that stand for an image."""

    def tokens(self, height: int, width: int, offset: int) -> list[int]:
        """Ids for a canvas of this size, in pixels, whose first token has prompt position
        `offset`."""
        ...


@dataclass(frozen=True, slots=True)
class UniformLayout:
    """One id for every token of the merged grid; `factor` pixels of a side per token."""

    token_id: int
    factor: int

    def tokens(self, height: int, width: int, offset: int) -> list[int]:
        """Rows times columns times the id; `offset` has no influence."""
        return [self.token_id] * ((height // self.factor) * (width // self.factor))


@dataclass(frozen=True, slots=True)
class ImageRules:
    """A checkpoint's images. placeholder: the control token that its template writes for one;
    None where only renderers in Python place images."""

    sizing: Sizing
    layout: Layout
    placeholder: str | None


def rules_of(config: Config, processor: Config, vocabulary: Vocabulary) -> ImageRules | None:
    """The rules of a checkpoint; None when it has no vision tower.

    config: config.json. processor: preprocessor_config.json, empty when absent. Raises
    StartupError for a field that is missing or out of range.
    """
    kind = str(config.get("model_type", ""))
    vision = config.get("vision_config")
    if kind == "deepseek_v4":
        return _deepseek_v4(config) if config.get("vision_n_layers") else None
    if not isinstance(vision, dict):
        return None
    placeholder = _placeholder(config, vocabulary)
    if kind == "deepseek_v41":
        return _deepseek_v41(config, vision, placeholder)
    if placeholder is None:
        logger.warning("tokenizer.json lacks the image token of config.json: no images are taken")
        return None
    if kind.startswith(("qwen3_5", "qwen4_exp")):
        return _qwen(config, vision, processor, placeholder)
    if kind.startswith("glm5_next"):
        return _glm(config, vision, processor, placeholder)
    return None


def _placeholder(config: Config, vocabulary: Vocabulary) -> str | None:
    token = vocabulary.added.get(config.get("image_token_id", -1))
    return token.text if token is not None and token.is_control else None


def _deepseek_v4(config: Config) -> ImageRules:
    sizing = DeepSeekV4Sizing(
        patch=_number(config, "vision_patch_size"),
        downsample=_number(config, "vision_downsample_ratio"),
        max_tokens=_number(config, "vision_max_n_token", low=16),
        min_pixels=_number(config, "vision_min_pixels"),
        max_aspect=_aspect(config, "vision_max_wh_ratio"),
    )
    first = _number(config, "vocab_size", low=_V4_FIRST_ID_FROM_END) - _V4_FIRST_ID_FROM_END
    return ImageRules(sizing, DeepSeekV4Layout(sizing, first), None)


def _deepseek_v41(config: Config, vision: Config, placeholder: str | None) -> ImageRules:
    sizing = DeepSeekV41Sizing(
        patch=_number(vision, "patch_size"),
        downsample=_number(vision, "downsample_ratio"),
        max_tokens=_number(vision, "max_image_tokens", low=16),
        min_pixels=_number(vision, "min_pixels"),
        max_aspect=_aspect(vision, "max_wh_ratio"),
    )
    layout = DeepSeekV41Layout(sizing, _number(config, "image_token_id", low=0))
    return ImageRules(sizing, layout, placeholder)


def _qwen(config: Config, vision: Config, processor: Config, placeholder: str) -> ImageRules:
    factor = _number(vision, "patch_size") * _number(vision, "spatial_merge_size")
    size = processor.get("size") or {}
    least, most = _QWEN_PIXELS
    sizing = SmartResize(
        factor,
        min_pixels=_number(size, "shortest_edge", default=processor.get("min_pixels", least)),
        max_pixels=_number(size, "longest_edge", default=processor.get("max_pixels", most)),
    )
    return _uniform(config, sizing, factor, placeholder)


def _glm(config: Config, vision: Config, processor: Config, placeholder: str) -> ImageRules:
    factor = _number(vision, "patch_size") * _number(vision, "spatial_merge_size")
    least, most = _GLM_TOKENS
    sizing = TokenBudget(
        factor,
        min_tokens=_number(processor, "min_image_tokens", default=least),
        max_tokens=_number(processor, "max_image_tokens", default=most),
    )
    return _uniform(config, sizing, factor, placeholder)


def _uniform(config: Config, sizing: Sizing, factor: int, placeholder: str) -> ImageRules:
    token_id = _number(config, "image_token_id", low=0)
    return ImageRules(sizing, UniformLayout(token_id, factor), placeholder)


def _number(fields: Config, name: str, *, low: int = 1, default: object = None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise StartupError(f"{name} of the image settings is {value!r}, expected at least {low}")
    return value


def _aspect(fields: Config, name: str) -> int | None:
    return None if fields.get(name) is None else _number(fields, name)
