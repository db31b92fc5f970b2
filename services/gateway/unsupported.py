"""Request fields that are known but have no implementation here: refused, never ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.gateway.errors import unsupported

Harmless = Callable[[Any], bool]


def _absent(value: Any) -> bool:
    return value is None


def _off(value: Any) -> bool:
    return value is None or value is False


# field -> whether its value asks for nothing that we cannot do
COMMON: Mapping[str, Harmless] = {
    "use_beam_search": _off,
    "length_penalty": lambda value: value is None or value == 1,
    "best_of": lambda value: value is None or value == 1,
    "mm_processor_kwargs": _absent,
    "media_io_kwargs": _absent,
    "logits_processors": _absent,
    "lora_path": _absent,
    "return_hidden_states": _off,
    "return_routed_experts": _off,
}
CHAT: Mapping[str, Harmless] = {
    "audio": _absent,
    "functions": lambda value: not value,
    "function_call": lambda value: value in (None, "none", "auto"),
}
COMMON_ONLY: Mapping[str, Harmless] = {}


def refuse_unsupported(fields: Mapping[str, Any], table: Mapping[str, Harmless]) -> None:
    """Raise ApiError 400 for the first field of `fields` that asks for something in a table."""
    for rules in (COMMON, table):
        for name, harmless in rules.items():
            if name in fields and not harmless(fields[name]):
                raise unsupported(f"`{name}`", name)
