"""A generation as data: everything that is decided before the first call to an engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from warhorse.v1 import engine_pb2, tokenizer_pb2

from services.gateway.tokens import count


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt tokens (packed), and what the tokenizer knows about the output that follows.

    images: with their places among the tokens; `images_kept` of them were not decoded anew.
    """

    token_ids: bytes
    text: str = ""
    start_state: tokenizer_pb2.ParseState = tokenizer_pb2.PARSE_STATE_TEXT
    eos_token_ids: tuple[int, ...] = ()
    images: tuple[tokenizer_pb2.ImageInput, ...] = ()
    reasoning_end: int | None = None  # token that ends the reasoning the output begins inside
    images_kept: int = 0

    @property
    def image_tokens(self) -> int:
        """Number of tokens that stand for images."""
        return sum(image.length for image in self.images)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return count(self.token_ids)


Rerender = Callable[[], Awaitable[Prompt]]


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """One prompt and its n choices.

    Choices are numbered from `first_choice` in the response. `restartable` says that the client
    has seen nothing before the end, so a lost engine may begin again from the start. `rerender`
    makes the prompt again, for images that their tokenizer no longer has.
    """

    prompt: Prompt
    request: engine_pb2.GenerateRequest
    parse: tokenizer_pb2.ParseOpen
    first_choice: int = 0
    stream_interval: int = 1
    restartable: bool = False
    deadline_seconds: float | None = None
    grammar_field: str = ""  # field of the request that its grammar comes from
    rerender: Rerender | None = None

    @property
    def choices(self) -> range:
        """Numbers of the choices in the response."""
        return range(self.first_choice, self.first_choice + (self.request.n or 1))
