# ruff: noqa: N806, N815 (shape suffixes)
"""What images add to a step: rows in place of embeddings, their spans, rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.engine.images import ImageSource, ImageSpan
from services.engine.models.base import VisionModel
from services.engine.runtime.batch import ImageBatch
from services.engine.scheduler.plan import SequenceId


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens `start` to `start + count` of a sequence, which a step computes."""

    sequence: SequenceId
    start: int
    count: int

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """The fields of `StepBatch` that come from images."""

    images: ImageBatch | None = None
    rope_positions_T3: torch.Tensor | None = None
    rope_lagging_T3: torch.Tensor | None = None


@dataclass(slots=True)
class _Known:
    """The images of one sequence and how many of its tokens have been computed."""

    spans: tuple[ImageSpan, ...]
    computed: int = 0


class ImageRows:
    """Encodes the images of an executor's sequences, each once, alone, and when it is needed.

    An embedding is dropped when every sequence that has the image is past it. One caller.
    """

    def __init__(
        self, vision: VisionModel | None, source: ImageSource | None, device: torch.device
    ) -> None:
        self._vision = vision
        self._source = source
        self._device = device
        self._known: dict[SequenceId, _Known] = {}
        # By digest and offset, on which the marks around an image may depend.
        self._embeddings: dict[tuple[bytes, int], torch.Tensor] = {}
        self._turns = vision is not None and vision.rope_positions((), 0, 1) is not None

    def __len__(self) -> int:
        """Embeddings that are kept."""
        return len(self._embeddings)

    def begin(self, sequence: SequenceId, spans: tuple[ImageSpan, ...]) -> None:
        """Get to know a sequence, or start it anew. ValueError without a tower for its images."""
        self.end(sequence)
        if spans and self._vision is None:
            raise ValueError(f"sequence {sequence} has images and this model takes none")
        if spans:
            self._known[sequence] = _Known(spans)

    def end(self, sequence: SequenceId) -> None:
        """Forget a sequence."""
        if self._known.pop(sequence, None) is not None:
            self._drop_unneeded()

    def inputs(self, parts: Sequence[Part]) -> ImageInputs:
        """What the images of a step's sequences give its batch, in the order of `parts`."""
        if not any(part.sequence in self._known for part in parts):
            return ImageInputs()
        for part in parts:
            self._reach(part.sequence, part.start)
        images = self._batch(parts)
        for part in parts:
            self._reach(part.sequence, part.end)
        self._drop_unneeded()
        positions, lagging = self._rope_positions(parts)
        return ImageInputs(images, positions, lagging)

    def _reach(self, sequence: SequenceId, position: int) -> None:
        if (known := self._known.get(sequence)) is not None:
            known.computed = position

    def _batch(self, parts: Sequence[Part]) -> ImageBatch | None:
        rows: list[int] = []
        values: list[torch.Tensor] = []
        firsts = [p for part in parts for p in range(part.start, part.end)]
        lasts = firsts.copy()
        row = 0  # of position 0 of the part's sequence
        for part in parts:
            row -= part.start
            for span, first, last in self._overlaps(part):
                rows += range(row + first, row + last)
                values.append(self._embedding(span)[first - span.offset : last - span.offset])
                firsts[row + first : row + last] = [span.offset] * (last - first)
                lasts[row + first : row + last] = [span.end - 1] * (last - first)
            row += part.end
        if not rows:
            return None
        return ImageBatch(self._ids(rows), torch.cat(values), self._ids(firsts), self._ids(lasts))

    def _overlaps(self, part: Part) -> list[tuple[ImageSpan, int, int]]:
        """Images with tokens in a part, and the positions of these tokens."""
        known = self._known.get(part.sequence)
        cuts = [
            (span, max(part.start, span.offset), min(part.end, span.end))
            for span in (known.spans if known is not None else ())
        ]
        return [cut for cut in cuts if cut[1] < cut[2]]

    def _embedding(self, span: ImageSpan) -> torch.Tensor:
        key = (span.digest, span.offset)
        if key not in self._embeddings:
            assert self._vision is not None and self._source is not None
            pixels = torch.tensor(self._source.pixels(span.digest), device=self._device)
            values_SH = self._vision.embed(pixels, span.offset)
            if values_SH.shape[0] != span.length:
                raise ValueError(f"an image of {span.length} tokens got {values_SH.shape[0]}")
            self._embeddings[key] = values_SH
        return self._embeddings[key]

    def _drop_unneeded(self) -> None:
        needed = {
            (span.digest, span.offset)
            for known in self._known.values()
            for span in known.spans
            if known.computed < span.end
        }
        self._embeddings = {k: v for k, v in self._embeddings.items() if k in needed}

    def _rope_positions(
        self, parts: Sequence[Part]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of the tokens, and of those that lie `rope_lag` tokens before them (0 before those)."""
        if self._vision is None or not self._turns:
            return None, None
        lag = self._vision.rope_lag
        positions, lagging = [], []
        for part in parts:
            known = self._known.get(part.sequence)
            spans = () if known is None else known.spans
            found_T3 = self._vision.rope_positions(spans, part.start - lag, part.count + lag)
            assert found_T3 is not None
            positions.append(found_T3[lag:])
            lagging.append(found_T3[: part.count].clamp_min(0))
        here_T3 = torch.cat(positions).to(self._device)
        return here_T3, torch.cat(lagging).to(self._device) if lag else None

    def _ids(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
