"""Typed reading of config.json objects; every refusal names the field, the value and the range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from services.common.checkpoint import CheckpointError
from services.engine.layers.rope import (
    RotaryFrequencies,
    default_rope,
    interleaved_axes,
    yarn_rope,
)

_MISSING = object()


class Fields:
    """One object of config.json, read by name and type."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def bad(self, name: str, wanted: str) -> CheckpointError:
        """The error for field `name`, whose value is not `wanted`."""
        value = self._values.get(name, _MISSING)
        found = "is missing" if value is _MISSING else f"is {value!r}"
        return CheckpointError(f"config.json: {self._where}{name} {found}, expected {wanted}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer >= `least`."""
        value = self._values.get(name)
        value = default if value is None else value
        if type(value) is not int or value < least:
            raise self.bad(name, f"an integer >= {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number > 0."""
        value = self._values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.bad(name, "a number > 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def choice(self, name: str, default: str, allowed: Mapping[str, str]) -> str:
        """One of the keys of `allowed`, mapped to its value."""
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            raise self.bad(name, f"one of {', '.join(sorted(allowed))}")
        return allowed[value]

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers; empty where the field is missing."""
        value = self._values.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(type(v) is int for v in value):
            raise self.bad(name, "a list of integers")
        return tuple(value)

    def text(self, name: str) -> str:
        """A string."""
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self.bad(name, "a string")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty where the field is missing."""
        value = self._values.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.bad(name, "a list of strings")
        return tuple(value)

    def below_zero(self, name: str, default: float | None) -> float | None:
        """A number < 0, or None where the field is null; `default` where it is missing."""
        value = self._values.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value < 0:
            raise self.bad(name, "a number < 0 or null")
        return float(value)

    def inner(self, name: str) -> Fields:
        """The object `name`; empty where it is missing."""
        value = self._values.get(name)
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise self.bad(name, "an object")
        return Fields(value, f"{self._where}{name}.")

    def layer_types(self, layers: int, aliases: Mapping[str, str]) -> tuple[str, ...]:
        """`layer_types`, or the pattern that `full_attention_interval` (default 4) gives."""
        value = self._values.get("layer_types")
        if value is None:
            interval = self.integer("full_attention_interval", 4)
            value = [
                "linear_attention" if (i + 1) % interval else "full_attention"
                for i in range(layers)
            ]
        if not isinstance(value, list) or len(value) != layers:
            raise self.bad("layer_types", f"a list of {layers} names")
        if unknown := [v for v in value if v not in aliases]:
            raise self.bad("layer_types", f"names of {sorted(aliases)}, not {unknown[0]!r}")
        return tuple(aliases[v] for v in value)

    def rope(self, head_dim: int) -> RotaryFrequencies:
        """Frequencies from `rope_parameters`, or from the older `rope_scaling` spelling."""
        inner = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        if not isinstance(inner, Mapping):
            raise self.bad("rope_parameters", "an object")
        outer = {k: self._values[k] for k in _ROPE_KEYS if k in self._values}
        fields = Fields({**outer, **inner}, f"{self._where}rope_parameters.")
        return _rope(fields, head_dim, self)


_ROPE_KEYS = ("rope_theta", "partial_rotary_factor", "rope_type")


def _rope(fields: Fields, head_dim: int, text: Fields) -> RotaryFrequencies:
    theta = fields.number("rope_theta", 1e7)
    width = int(head_dim * fields.number("partial_rotary_factor", 0.25))
    if width < 2 or width % 2 or width > head_dim:
        raise fields.bad("partial_rotary_factor", f"an even share of head_dim {head_dim}")
    kind = fields.choice("rope_type", "default", {"default": "default", "yarn": "yarn"})
    axis_F = _axes(fields, width // 2)
    if kind == "default":
        return replace(default_rope(theta, width), axis_F=axis_F)
    original = fields.integer(
        "original_max_position_embeddings", text.integer("max_position_embeddings")
    )
    rope = yarn_rope(
        theta,
        width,
        factor=fields.number("factor"),
        original_positions=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
    )
    return replace(rope, axis_F=axis_F)


def _axes(fields: Fields, frequencies: int) -> torch.Tensor | None:  # [F]
    """Which axis turns which frequency, where `mrope_section` says so."""
    sections = fields.integers("mrope_section")
    if not sections:
        return None
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != frequencies:
        raise fields.bad("mrope_section", f"three numbers whose sum is {frequencies}")
    if not fields.flag("mrope_interleaved", True):
        raise fields.bad("mrope_interleaved", "true")
    return interleaved_axes(sections)


def text_fields(config: Mapping[str, Any]) -> Fields:
    """The `text_config` of a composite config, or the config itself."""
    inner = config.get("text_config")
    if inner is None:
        return Fields(config, "")
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"config.json: text_config is {type(inner).__name__}, not an object")
    return Fields(inner, "text_config.")
