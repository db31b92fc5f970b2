"""Qwen3.8 with images equals `transformers`: tower, rotary positions, logits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.common.checkpoint import CheckpointError
from services.engine.images import ImageSpan
from services.engine.layers.vision.qwen import QwenVision
from tests.models.conftest import GetTiny, load, tables_of
from tests.models.runner import Live, Part
from tests.models.tiny import Family, TinyCheckpoint, prompt
from tests.models.vision.image_runner import ImageRunner, span_of
from tests.models.vision.towers import picture

IMAGE = 500  # image_token_id of the tiny checkpoints
PATCH = 16
TOLERANCE = 1e-4  # absolute, fp32; logits have a standard deviation of 0.2 and more
FAMILIES: list[Family] = ["qwen3_5", "qwen4_exp"]


@dataclass(frozen=True)
class Page:
    """A prompt with pictures: its ids, and the pictures with their places."""

    ids: list[int]
    images: dict[ImageSpan, torch.Tensor]

    @classmethod
    def of(cls, *pieces: int | tuple[int, int], seed: int = 0) -> Page:
        """Pieces are numbers of text tokens and (rows, columns) of patches of pictures."""
        ids: list[int] = []
        images: dict[ImageSpan, torch.Tensor] = {}
        for number, piece in enumerate(pieces):
            if isinstance(piece, int):
                ids += prompt(piece, seed=seed + number)
                continue
            rows, columns = piece
            pixels = picture(rows * PATCH, columns * PATCH, seed=seed + number)
            images[span_of(pixels, len(ids), rows * columns // 4)] = pixels
            ids += [IMAGE] * (rows * columns // 4)
        return cls(ids, images)


PAGES = {
    "one image": Page.of(9, (4, 6), 14),
    "two images with text between": Page.of(3, (6, 4), 8, (2, 8), 21),
    "image at the start and at the end": Page.of((4, 4), 12, (8, 2)),
}


def oracle_inputs(page: Page) -> dict[str, torch.Tensor]:
    """What the oracle wants: normalised patches in blocks of 2 x 2, two equal frames each."""
    patches, grids = [], []
    for span, pixels in page.images.items():
        rows, columns = span.height // PATCH, span.width // PATCH
        normal = (pixels / 255 - 0.5) / 0.5
        cells = normal.view(rows // 2, 2, PATCH, columns // 2, 2, PATCH, 3)
        blocks = cells.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, PATCH, PATCH)
        patches.append(blocks.expand(-1, -1, 2, -1, -1).flatten(1))
        grids.append([1, rows, columns])
    ids = torch.tensor([page.ids])
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor(grids),
    }


def tower_of(tiny: TinyCheckpoint) -> QwenVision:
    tower = load(tiny.folder).vision
    assert isinstance(tower, QwenVision)
    return tower


def runner_of(tiny: TinyCheckpoint) -> ImageRunner:
    return ImageRunner([load(tiny.folder)], tables_of(tiny.folder))


@torch.inference_mode()
@pytest.mark.parametrize("size", [(2, 2), (6, 10), (8, 4), (20, 2)])
def test_tokens_equal_transformers(get_tiny: GetTiny, size: tuple[int, int]) -> None:
    tiny = get_tiny("qwen3_5", "fp32")
    page = Page.of(size)
    inputs = oracle_inputs(page)
    output = tiny.oracle.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    (pixels,) = page.images.values()
    found = tower_of(tiny).embed(pixels, offset=0)
    assert output.pooler_output[0].std() > 0.2
    torch.testing.assert_close(found, output.pooler_output[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", PAGES)
def test_rotary_positions_equal_transformers(get_tiny: GetTiny, name: str) -> None:
    """Whole, and piece by piece from any position on; behind the prompt as for its output."""
    tiny, page = get_tiny("qwen3_5", "fp32"), PAGES[name]
    inputs = oracle_inputs(page)
    positions, deltas = tiny.oracle.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    )
    expected, length = positions[:, 0].T, len(page.ids)
    tower, images = tower_of(tiny), tuple(page.images)
    assert torch.equal(tower.rope_positions(images, 0, length), expected)
    for start in range(length):
        part = tower.rope_positions(images, start, 3)
        assert torch.equal(part[: length - start], expected[start : start + 3])
    behind = tower.rope_positions(images, length + 4, 1)
    assert behind.tolist() == [[length + 4 + int(deltas[0])] * 3]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_and_chunks_give_the_same_bits(
    get_tiny: GetTiny, family: Family, name: str
) -> None:
    tiny, page = get_tiny(family, "fp32"), PAGES[name]
    with torch.inference_mode():
        expected = tiny.oracle(**oracle_inputs(page)).logits[0]
    whole = runner_of(tiny).run_images(page.ids, page.images, len(page.ids))
    torch.testing.assert_close(whole, expected, rtol=0, atol=TOLERANCE)
    for chunk in (1, 5):
        assert torch.equal(runner_of(tiny).run_images(page.ids, page.images, chunk), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_changes_what_comes_behind_it_alone(get_tiny: GetTiny, family: Family) -> None:
    tiny, page = get_tiny(family, "fp32"), PAGES["two images with text between"]
    first, second = page.images
    other = page.images[second].clone()
    other[1, 2, 0] ^= 1
    changed = {
        first: page.images[first],
        span_of(other, second.offset, second.length): other,
    }
    runs = [runner_of(tiny).run_images(page.ids, im, 64) for im in (page.images, changed)]
    assert torch.equal(runs[0][: second.offset], runs[1][: second.offset])
    assert not torch.equal(runs[0][-1], runs[1][-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_in_a_step_change_no_bit(get_tiny: GetTiny, family: Family) -> None:
    """Two prompts with images and one without, in chunks that end at different places."""
    tiny = get_tiny(family, "fp32")
    pages = [PAGES["one image"], PAGES["image at the start and at the end"], Page.of(30, seed=5)]
    alone = [runner_of(tiny).run_images(p.ids, p.images, len(p.ids)) for p in pages]
    runner = runner_of(tiny)
    lives = [Live() for _ in pages]
    for live, page in zip(lives, pages, strict=True):
        runner.add_images(live, page.images)
    found: list[list[torch.Tensor]] = [[] for _ in pages]
    for start in range(0, max(len(p.ids) for p in pages), 7):
        parts = [
            (i, Part(live, page.ids[start : start + 7]))
            for i, (live, page) in enumerate(zip(lives, pages, strict=True))
            if start < len(page.ids)
        ]
        for (i, _), logits in zip(parts, runner.step([p for _, p in parts])[0], strict=True):
            found[i].append(logits)
    for expected, pieces in zip(alone, found, strict=True):
        assert torch.equal(torch.cat(pieces), expected)


def test_a_tower_without_axes_of_its_rope_is_refused(get_tiny: GetTiny, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="mrope_section is missing"):
        load(changed_folder(get_tiny("qwen3_5", "fp32"), tmp_path, mrope_section=[]))
    with pytest.raises(CheckpointError, match=r"mrope_section is \[3, 3, 3\], expected .* 8"):
        load(changed_folder(get_tiny("qwen3_5", "fp32"), tmp_path, mrope_section=[3, 3, 3]))


def changed_folder(tiny: TinyCheckpoint, folder: Path, **rope: object) -> Path:
    """The same checkpoint with other fields in `rope_parameters`."""
    config = json.loads((tiny.folder / "config.json").read_text())
    config["text_config"]["rope_parameters"] |= rope
    for file in tiny.folder.glob("*.safetensors*"):
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
