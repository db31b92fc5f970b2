"""Thinking switches and reasoning efforts, as the families understand them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import StartupError
from services.tokenizer.rendering.conversation import Conversation, refuse

NONE = "none"
UNSET = "unset"
_MAX_ECHO = 64


def effort_map(text: str) -> dict[str, str]:
    """Return the map that `name=value,name=value` means. Raises StartupError.

    The name `unset` stands for requests that name no effort.
    """
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if any(not name.strip() or not value.strip() for name, _, value in pairs):
        raise StartupError(
            f"--reasoning-effort-map must read name=value,name=value; got {text[:_MAX_ECHO]!r}"
        )
    return {name.strip(): value.strip() for name, _, value in pairs}


def requested_effort(conversation: Conversation, renamed: Mapping[str, str]) -> str | None:
    """Return the effort of the request's field or template arguments, renamed; None when unset."""
    given = conversation.effort
    if given is None:
        argument = conversation.arguments.get("reasoning_effort")
        given = None if argument is None else str(argument)
    return renamed.get(UNSET if given is None else given, given)


def refuse_effort(effort: str, known: str) -> None:
    """Refuse an effort that a family does not know. Raises ServiceError."""
    shown = effort[:_MAX_ECHO]
    raise refuse(f"reasoning_effort must be one of {known}; got {shown!r}", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class Thinking:
    """Whether the model thinks, and the effort that was asked for (None: the family's own)."""

    enabled: bool
    effort: str | None = None


def thinking_of(conversation: Conversation, renamed: Mapping[str, str]) -> Thinking:
    """Return how DeepSeek models think.

    The effort "none" wins; then what template arguments or the request say about thinking; without
    either the model thinks. Raises ServiceError.
    """
    effort = requested_effort(conversation, renamed)
    if effort == NONE:
        return Thinking(False)
    for name in ("thinking", "enable_thinking"):
        value = _switch(name, conversation.arguments.get(name))
        if value is not None:
            return Thinking(value, effort if value else None)
    enabled = conversation.enable_thinking is not False
    return Thinking(enabled, effort if enabled else None)


def _switch(name: str, value: Any) -> bool | None:
    """Return what a template argument says: true, false or {"type": ...}; None when nothing."""
    kind = value.get("type") if isinstance(value, Mapping) else value
    known: dict[Any, bool] = {True: True, False: False, "enabled": True, "disabled": False}
    if kind is None or kind == "adaptive":
        return None
    if isinstance(kind, bool | str) and kind in known:
        return known[kind]
    raise refuse(f"{name} must be true or false", "template_kwargs_json")
