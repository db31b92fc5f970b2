"""Images among the tokens of a prompt: what is checked of them, and where a prompt may be cut."""

from __future__ import annotations

from dataclasses import dataclass

from warhorse.v1.common_pb2 import ErrorReason

from services.engine.images import ImageSpan
from services.engine.models.base import VisionModel
from services.engine.scheduler.messages import Request, RequestRefused


@dataclass(frozen=True, slots=True)
class AtomicSpans:
    """Ranges (first, end) of positions that are computed in one step each.

    No chunk, no prefix hit and no snapshot ends at a position p with first < p < end.
    """

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, images: tuple[ImageSpan, ...], vision: VisionModel | None) -> AtomicSpans:
        """Those of a request; none for models whose image tokens see only what lies before."""
        if vision is None or not vision.atomic_spans:
            return NO_SPANS
        return cls(tuple((image.offset, image.end) for image in images))

    def cut(self, position: int) -> int:
        """The last position up to `position` at which no range is cut."""
        for first, end in self.spans:
            if first < position < end:
                return first
        return position

    def least(self, start: int) -> int:
        """The fewest tokens from `start` on after which no range is cut."""
        for first, end in self.spans:
            if first < start + 1 < end:
                return end - start
        return 1


NO_SPANS = AtomicSpans()


def check_images(request: Request, vision: VisionModel | None, step_tokens: int) -> None:
    """Raise RequestRefused for images that the model or its steps of `step_tokens` do not take."""
    if request.images and vision is None:
        raise RequestRefused(
            ErrorReason.ERROR_REASON_UNSUPPORTED, "this model takes no images", field="images"
        )
    end = 0
    for index, image in enumerate(request.images):
        _check_place(index, image, end, len(request.prompt_token_ids))
        if vision is not None:
            _check_size(index, image, vision, step_tokens)
        end = image.end


def _check_place(index: int, image: ImageSpan, start: int, tokens: int) -> None:
    if not start <= image.offset < image.end <= tokens:
        raise _invalid(
            index,
            f"covers tokens {image.offset} to {image.end} and must cover at least one of "
            f"{start} to {tokens}",
        )


def _check_size(index: int, image: ImageSpan, vision: VisionModel, step_tokens: int) -> None:
    try:
        length = vision.span_tokens(image.height, image.width, image.offset)
    except ValueError as error:
        raise _invalid(index, f"cannot be taken: {error}") from error
    if length != image.length:
        raise _invalid(
            index,
            f"covers {image.length} tokens and must cover {length}, for {image.height} x "
            f"{image.width} pixels at token {image.offset}",
        )
    if vision.atomic_spans and length > step_tokens:
        raise _invalid(
            index,
            f"has {length} tokens, which are computed in one step, and a step has at most "
            f"{step_tokens} (max_num_batched_tokens)",
        )


def _invalid(index: int, problem: str) -> RequestRefused:
    field = f"images[{index}]"
    return RequestRefused(ErrorReason.ERROR_REASON_INVALID_FIELD, f"{field} {problem}", field=field)
