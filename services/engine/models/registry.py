"""Which module serves which checkpoint, decided by its config."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from services.common.checkpoint import Checkpoint, CheckpointError
from services.engine.models import deepseek_v4, deepseek_v41, glm5_next, qwen3_5, qwen4_exp
from services.engine.models.base import Collectives, NoCollectives, Shard, StageModel


class _Load(Protocol):
    def __call__(
        self,
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        shard: Shard,
        collectives: Collectives,
    ) -> StageModel: ...


class _LoadWithCacheForm(_Load, Protocol):
    def __call__(
        self,
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        shard: Shard,
        collectives: Collectives,
        quantised_cache: bool = False,
    ) -> StageModel: ...


_FAMILIES: dict[str, _Load] = {
    "deepseek_v4": deepseek_v4.load,
    "deepseek_v41": deepseek_v41.load,
    "glm5_next": glm5_next.load,
    "qwen3_5": qwen3_5.load,
    "qwen4_exp": qwen4_exp.load,
}
_QUANTISED_CACHES: dict[str, _LoadWithCacheForm] = {
    "deepseek_v4": deepseek_v4.load,
    "deepseek_v41": deepseek_v41.load,
    "glm5_next": glm5_next.load,
}
_ARCHITECTURES = {
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV4ForConditionalGeneration": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "DeepseekV41ForConditionalGeneration": "deepseek_v41",
    "Glm5NextForConditionalGeneration": "glm5_next",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp",
    "Qwen4ExpForCausalLM": "qwen4_exp",
    "Qwen3_8FlashNextForConditionalGeneration": "qwen4_exp",
    "Qwen3_8_FlashNextForConditionalGeneration": "qwen4_exp",
}
_MODEL_TYPES = {
    "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v41",
    "deepseek_v41_text": "deepseek_v41",
    "glm5_next": "glm5_next",
    "glm5_next_text": "glm5_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen4_exp": "qwen4_exp",
    "qwen4_exp_text": "qwen4_exp",
    "qwen3_8_flash_next": "qwen4_exp",
    "qwen3_8_flash_next_text": "qwen4_exp",
}


def family_of(config: Mapping[str, Any]) -> str:
    """Name of the family, from `architectures`, else from `model_type`.

    CheckpointError names an architecture that is not served.
    """
    architectures = config.get("architectures") or []
    for name in architectures:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    model_type = config.get("model_type")
    if not architectures and model_type in _MODEL_TYPES:
        return _MODEL_TYPES[model_type]
    raise CheckpointError(
        f"config.json: unknown architecture {architectures} (model_type {model_type!r}); served "
        f"are {', '.join(sorted(_ARCHITECTURES))}"
    )


def load_model(
    folder: Path,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    shard: Shard | None = None,
    collectives: Collectives | None = None,
    quantised_cache: bool = False,
) -> StageModel:
    """The part of the checkpoint in `folder` that `shard` names (all of it by default).

    Weights keep their stored type on `device`; activations are `compute_dtype`, residuals,
    states of the delta rule and logits fp32. An n-gram table is not loaded: its rows come with
    each batch.

    `quantised_cache` stores cache rows as the model was trained with them instead of in the type
    of activations. On the meta device no weight is read: what depends on sizes is there.

    Raises CheckpointError, naming file, tensor and both shapes or byte counts, for a damaged
    folder, an unknown architecture, and a tensor that is missing, surplus or misshaped.
    """
    with Checkpoint.open(folder) as checkpoint:
        return _loader(family_of(checkpoint.config), quantised_cache)(
            checkpoint,
            device=device,
            compute_dtype=compute_dtype,
            shard=shard or Shard(),
            collectives=collectives or NoCollectives(),
        )


def _loader(family: str, quantised_cache: bool) -> _Load:
    if not quantised_cache:
        return _FAMILIES[family]
    if family not in _QUANTISED_CACHES:
        served = ", ".join(sorted(_QUANTISED_CACHES))
        raise CheckpointError(f"a quantised cache is served for {served}, not for {family}")
    return partial(_QUANTISED_CACHES[family], quantised_cache=True)
