"""Images in their places among the segments of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.tokenizer.rendering.conversation import ImagePart, refuse
from services.tokenizer.vocabulary import Segment

Piece = Segment | ImagePart


def with_images(
    segments: Iterable[Segment], placeholder: str | None, images: Sequence[ImagePart]
) -> tuple[Piece, ...]:
    """Return segments with the k-th placeholder replaced by the k-th image.

    Raises ServiceError when the template wrote another number of them, naming the first image
    without a place.
    """
    pieces: list[Piece] = []
    waiting = list(reversed(images))
    for segment in segments:
        is_place = segment.is_special and segment.text == placeholder
        if is_place and not waiting:
            raise refuse("the chat template writes an image where there is none", "messages")
        pieces.append(waiting.pop() if is_place else segment)
    if waiting:
        raise refuse("the chat template has no place for this image", waiting[-1].where)
    return tuple(pieces)
