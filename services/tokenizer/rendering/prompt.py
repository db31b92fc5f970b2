"""A prompt in segments, and what builds one without a template."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from services.tokenizer.images.placing import Piece
from services.tokenizer.rendering.conversation import Conversation, ImagePart, Part
from services.tokenizer.vocabulary import Segment, Vocabulary

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt: segments of text, and images between them.

    placeholder: how `text` shows an image. plain: the output is text alone; nothing in it is
    reasoning or a call.
    """

    segments: tuple[Piece, ...]
    placeholder: str = ""
    plain: bool = False

    @property
    def text(self) -> str:
        """The whole text, special tokens included."""
        return "".join(
            self.placeholder if isinstance(piece, ImagePart) else piece.text
            for piece in self.segments
        )

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """The images in the order of their places."""
        return tuple(piece for piece in self.segments if isinstance(piece, ImagePart))


class Renderer(Protocol):
    """Makes the prompts of one checkpoint. User text never gives a control token."""

    async def render(self, conversation: Conversation) -> Prompt:
        """Return the prompt. Raises RenderError, or ServiceError for a field at fault."""
        ...


class PromptBuilder:
    """Collects the pieces of a prompt; ordinary text that touches is one segment, as the encoder
    would see it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._pieces: list[Piece] = []
        self._texts: list[str] = []

    def own(self, text: str) -> None:
        """Add text of the format itself: control tokens in it are real."""
        for segment in self._vocabulary.split(text):
            if segment.is_special:
                self._flush()
                self._pieces.append(segment)
            else:
                self._texts.append(segment.text)

    def foreign(self, text: str) -> None:
        """Add text that somebody else wrote: it is text whatever it says."""
        self._texts.append(encodable(text))

    def parts(self, parts: Iterable[Part], joint: str) -> None:
        """Add the parts of a message with a text of the format between them."""
        for index, part in enumerate(parts):
            if index:
                self._texts.append(joint)
            if isinstance(part, ImagePart):
                self._flush()
                self._pieces.append(part)
            else:
                self.foreign(part)

    def _flush(self) -> None:
        text = "".join(self._texts)
        self._texts.clear()
        if text:
            self._pieces.append(Segment(text, False))

    def pieces(self) -> tuple[Piece, ...]:
        """Return all that was added."""
        self._flush()
        return tuple(self._pieces)


def encodable(text: str) -> str:
    """Return text that UTF-8 can hold: JSON escapes can name half of a surrogate pair."""
    return text if text.isascii() else _LONE_SURROGATES.sub("\ufffd", text)
