"""Sampling defaults of a deployment: what requests fall back to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from services.gateway.schema.fields import UINT32_MAX, Int, Lenient, Number

logger = logging.getLogger(__name__)


class GenerationDefaults(Lenient):
    """Names as `generation_config.json` has them; None: the file says nothing."""

    temperature: Number | None = Field(None, ge=0, le=2, description="a number from 0 to 2")
    top_p: Number | None = Field(None, gt=0, le=1, description="a number above 0 and at most 1")
    top_k: Int | None = Field(None, ge=-1, le=UINT32_MAX, description="an integer of at least -1")
    min_p: Number | None = Field(None, ge=0, le=1, description="a number from 0 to 1")
    repetition_penalty: Number | None = Field(
        None, gt=0, allow_inf_nan=False, description="a finite number above 0"
    )
    max_new_tokens: Int | None = Field(
        None, ge=1, le=UINT32_MAX, description="an integer of at least 1"
    )


def overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` when all names and values are right. Raises ValueError naming one that is not."""
    fields = GenerationDefaults.model_fields
    for name in given:
        if name not in fields:
            known = ", ".join(fields)
            raise ValueError(f"override_generation_config has no field {name!r}; known: {known}")
    for name, problem in _problems(given).items():
        raise ValueError(f"override_generation_config: {name} {problem}")
    return dict(given)


def of_checkpoint(found: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a checkpoint's file, without values that no request could have."""
    known = {name: found[name] for name in GenerationDefaults.model_fields if name in found}
    for name, problem in _problems(known).items():
        logger.warning("generation_config.json: %s %s; it is left out", name, problem)
        del known[name]
    return known


def _problems(given: Mapping[str, Any]) -> dict[str, str]:
    try:
        GenerationDefaults.model_validate(given)
    except ValidationError as error:
        names = [str(entry["loc"][0]) for entry in error.errors()]
        fields = GenerationDefaults.model_fields
        return {n: f"must be {fields[n].description}, got {given[n]!r:.60}" for n in names}
    return {}
