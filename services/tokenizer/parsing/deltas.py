"""What a parser gives out. Plain data, free of gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Finish(Enum):
    """Why a choice ended, before or after parsing."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class ReasoningDelta:
    """More text of the reasoning."""

    text: str


@dataclass(slots=True)
class ContentDelta:
    """More text of the answer."""

    text: str


@dataclass(slots=True)
class CallDelta:
    """A call opens (`id` and `name` set, `arguments` empty) or gets more of its JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


Delta = ReasoningDelta | ContentDelta | CallDelta
