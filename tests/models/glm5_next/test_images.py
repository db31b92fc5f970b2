"""Text with images equals `transformers`, pixels in and logits out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.engine.layers.vision.parts import Grid
from services.engine.runtime.batch import ImageBatch
from tests.models.glm5_next import oracle
from tests.models.glm5_next.conftest import GetNano, Model, prompt
from tests.models.runner import Live, Part, Runner
from tests.models.vision.test_glm_tower import inputs
from tests.models.vision.towers import picture

IMAGE, START, END = 500, 502, 503  # token ids of the nano config
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])
TOLERANCE = 1e-4  # absolute, fp32


def sequence(sides: list[tuple[int, int]]) -> tuple[list[int], list[torch.Tensor]]:
    """Token ids with text around every image, and the images."""
    ids = prompt(20, seed=1)
    for number, (height, width) in enumerate(sides):
        tokens = height * width // 28**2
        ids += [START, *[IMAGE] * tokens, END, *prompt(11, seed=10 + number)]
    return ids, [picture(*side, seed=number) for number, side in enumerate(sides)]


def expected_logits(
    model: torch.nn.Module, ids: list[int], pictures: list[torch.Tensor]
) -> torch.Tensor:
    patches, grids = [], []
    for pixels in pictures:
        grid = Grid.of(pixels.shape[0], pixels.shape[1], 14)
        normal = (pixels / 255 - MEAN) / STD
        flat, its_grid = inputs(normal.unfold(0, 14, 14).unfold(1, 14, 14).flatten(0, 1), grid)
        patches.append(flat)
        grids.append(its_grid)
    with torch.inference_mode():
        found = model(
            input_ids=torch.tensor([ids]),
            pixel_values=torch.cat(patches),
            image_grid_thw=torch.cat(grids),
        )
    return found.logits[0]


@pytest.mark.parametrize("sides", [[(56, 84)], [(28, 56), (84, 84)]])
def test_logits_with_images_equal_transformers(
    nano: Model, get_nano: GetNano, sides: list[tuple[int, int]]
) -> None:
    ids, pictures = sequence(sides)
    assert nano.vision is not None
    rows = [i for i, token in enumerate(ids) if token == IMAGE]
    values = torch.cat([nano.vision.embed(pixels, 0) for pixels in pictures])
    assert len(values) == len(rows) > 0
    runner = Runner([nano])
    batch, _ = runner._batch([Part(Live(), ids)])
    spans = batch.positions_T  # not used: no token of an image sees ahead
    images = ImageBatch(torch.tensor(rows), values, spans, spans)
    found = nano.forward(replace(batch, images=images), runner.pools[0])
    expected = expected_logits(oracle.oracle_of(get_nano("fp8")), ids, pictures)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    plain = Runner([nano]).run(ids, len(ids))
    assert (plain - expected)[rows[0] :].abs().amax(1).min() > 10 * TOLERANCE
    assert torch.equal(plain[: rows[0]], found[: rows[0]])
