"""What a generation yields: typed pieces of output, independent of any HTTP format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from warhorse.v1 import engine_pb2


@dataclass(slots=True)
class Reasoning:
    """A piece of reasoning text."""

    text: str


@dataclass(slots=True)
class Content:
    """A piece of answer text."""

    text: str


@dataclass(slots=True)
class CallOpened:
    """A tool call begins; comes once per call, with its complete name."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Piece = Reasoning | Content | CallOpened | CallArguments


@dataclass(slots=True)
class Update:
    """Tokens that were parsed and the pieces that they completed (possibly none)."""

    choice: int
    pieces: list[Piece]
    token_ids: Sequence[int] = ()
    # One per token when log-probabilities were asked for.
    logprobs: Sequence[engine_pb2.TokenLogprob] = ()


@dataclass(slots=True)
class Ended:
    """A choice is complete. `stop_reason` is a stop string, a stop token or None."""

    choice: int
    finish_reason: str
    stop_reason: str | int | None


@dataclass(slots=True)
class Restarted:
    """Everything received for these choices is void; they begin again."""

    choices: range


Event = Update | Ended | Restarted


@dataclass(slots=True)
class Usage:
    """Token counts of a request; only tokens that were delivered count."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    created: int = 0  # prompt tokens that are new in the prefix cache
    reasoning: int = 0
    images: int = 0

    def add(self, other: Usage) -> None:
        """Add the counts of another prompt of the same request."""
        self.prompt += other.prompt
        self.completion += other.completion
        self.cached += other.cached
        self.created += other.created
        self.reasoning += other.reasoning
        self.images += other.images


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """What the engine spent on one prompt and its choices, seconds and tokens."""

    queue: float
    prefill: float
    decode: float
    prompt: int
    cached: int
    external: int
    preemptions: int


@dataclass(slots=True)
class PromptReport:
    """What became known while the prompt was computed."""

    cached_tokens: int = 0
    external_cached_tokens: int = 0
    created_cache_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    at: float = 0.0  # clock reading; 0: not yet
    logprobs: list[engine_pb2.TokenLogprob] = field(default_factory=list)
