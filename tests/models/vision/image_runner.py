"""Drives a model over prompts with images, cut into chunks in whatever way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from services.common.images import image_digest
from services.engine.images import ImageSpan, ImageStore
from services.engine.runtime.batch import StepBatch
from services.engine.runtime.image_rows import ImageRows
from services.engine.runtime.image_rows import Part as Place
from services.engine.scheduler.plan import SequenceId
from tests.models.runner import Live, Part, Runner


def span_of(pixels: torch.Tensor, offset: int, length: int) -> ImageSpan:
    """The place of a picture in a prompt."""
    height, width, _ = pixels.shape
    return ImageSpan(offset, length, image_digest(pixels.numpy()), height, width)


class ImageRunner(Runner):
    """A runner whose sequences may have images; they are known by the object of the sequence."""

    def add_images(self, live: Live, images: Mapping[ImageSpan, torch.Tensor]) -> None:
        """Give a sequence its images before its first step."""
        if not hasattr(self, "images"):
            self.store = ImageStore()
            self.images = ImageRows(self.stages[0].vision, self.store, torch.device("cpu"))
            self.numbers: dict[int, SequenceId] = {}
        number = self.numbers.setdefault(id(live), SequenceId(len(self.numbers)))
        self.store.hold(str(number), {s.digest: p.numpy() for s, p in images.items()})
        self.images.begin(number, tuple(images))

    def run_images(
        self, ids: Sequence[int], images: Mapping[ImageSpan, torch.Tensor], chunk: int
    ) -> torch.Tensor:
        """Logits [len(ids), vocab] of one sequence computed in chunks."""
        live = Live()
        self.add_images(live, images)
        out = [self.step([Part(live, ids[i : i + chunk])])[0][0] for i in range(0, len(ids), chunk)]
        self.images.end(self.numbers[id(live)])
        self.release(live)
        return torch.cat(out)

    def _batch(self, parts: Sequence[Part]) -> tuple[StepBatch, list[list[int]]]:
        batch, slots = super()._batch(parts)
        places = [
            Place(self.numbers.get(id(p.live), SequenceId(-1)), len(p.live.ids), len(p.tokens))
            for p in parts
        ]
        with torch.inference_mode():
            inputs = self.images.inputs(places)
        return replace(
            batch,
            images=inputs.images,
            rope_positions_T3=inputs.rope_positions_T3,
            rope_lagging_T3=inputs.rope_lagging_T3,
        ), slots
