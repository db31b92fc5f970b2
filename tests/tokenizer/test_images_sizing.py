"""Sizes and pixels of images against DeepSeek's own figures and the processors of transformers."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from services.tokenizer.images.decode_worker import answer
from services.tokenizer.images.deepseek import (
    DeepSeekV4Layout,
    DeepSeekV4Sizing,
    DeepSeekV41Layout,
    DeepSeekV41Sizing,
)
from services.tokenizer.images.sizing import (
    LOW_DETAIL_PIXELS,
    ImageSizeError,
    Sizing,
    SmartResize,
    TokenBudget,
    framed,
)
from tests.service_process import ROOT
from tests.tokenizer.pictures import file_of, noise

GOLDENS = ROOT / "tests" / "goldens"
V41 = {
    "released": DeepSeekV41Sizing(14, 3, 1024, 295_936),
    "tiny": DeepSeekV41Sizing(14, 3, 64, 7056),
}
V4 = {
    "released": DeepSeekV4Sizing(14, 3, 384, 147_456, 8),
    "tiny": DeepSeekV4Sizing(14, 3, 64, 7056, 8),
}
V4_PLAN = json.loads((GOLDENS / "deepseek_v4" / "image_plan.json").read_text())
V41_PLAN = json.loads((GOLDENS / "deepseek_v41" / "cases.json").read_text())["image_grid_plan"]
SIZES = [
    *((1, 1), (1, 150), (31, 33), (97, 41), (128, 128), (255, 256), (480, 640), (700, 701)),
    *((33, 6000), (3000, 20), (1080, 1920), (2160, 3840), (5000, 5000)),
]


def fitted(pixels: npt.NDArray[np.uint8], sizing: Sizing) -> npt.NDArray[np.uint8]:
    head, _, body = answer(b"auto\n" + file_of(pixels), sizing, 1 << 26).partition(b"\n")
    fields = json.loads(head)
    return np.frombuffer(body, np.uint8).reshape(fields["height"], fields["width"], 3)


@pytest.mark.parametrize("limits", V41)
@pytest.mark.parametrize(
    ("plan", "sizings"), [(V41_PLAN, V41), (V4_PLAN, V4)], ids=["v41", "vision-exp"]
)
def test_deepseek_sizes_and_token_counts(
    plan: dict[str, Any], sizings: dict[str, Any], limits: str
) -> None:
    sizing = sizings[limits]
    for width, height, rows, columns, *canvas, tokens in plan[limits]:
        frame = sizing.frame(height, width)
        assert [frame.height, frame.width] == canvas, (width, height)
        assert sizing.grid(*canvas) == (rows, columns)
        assert sizing.tokens(*canvas) == tokens


@pytest.mark.parametrize("name", ["wide", "tall", "big"])
def test_deepseek_v41_pixels_give_the_published_patches(name: str) -> None:
    with np.load(GOLDENS / "deepseek_v41" / "image_preprocess.npz") as golden:
        rgb, bits, grid = golden[f"{name}.rgb"], golden[f"{name}.patches"], golden[f"{name}.grid"]
    pixels = torch.from_numpy(fitted(rgb, V41["tiny"]).copy()).float()
    rows, columns = pixels.shape[0] // 14, pixels.shape[1] // 14
    normal = ((pixels / 255 - 0.5) / 0.5).bfloat16()
    patches = normal.view(rows, 14, columns, 14, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3, 14, 14)
    assert [rows, columns] == list(grid[:2])
    assert np.array_equal(patches.view(torch.int16).numpy().view(np.uint16), bits)


@pytest.mark.parametrize("case", V4_PLAN["roles"], ids=str)
def test_vision_exp_tokens_are_tiles_behind_alignment(case: dict[str, Any]) -> None:
    layout = DeepSeekV4Layout(V4["released"], 1000)
    ids = layout.tokens(case["rows"] * 42, case["columns"] * 42, case["offset"])
    assert ids == [1000 + role for role in case["roles"]]
    start = case["offset"] + ids.index(1000)
    assert start % 4 == 3


def test_v41_tokens_carry_one_id() -> None:
    layout = DeepSeekV41Layout(V41["tiny"], 500)
    assert layout.tokens(2 * 42, 3 * 42, 7) == [500] * (2 * (3 + 1) + 2)


@pytest.mark.parametrize(("least", "most"), [(56 * 56, 28 * 28 * 1280), (65_536, 16_777_216)])
@pytest.mark.parametrize("factor", [28, 32])
def test_qwen_sizes_equal_transformers(factor: int, least: int, most: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    sizing = SmartResize(factor, least, most)
    for height, width in SIZES:
        frame = sizing.frame(height, width)
        assert (frame.height, frame.width) == smart_resize(height, width, factor, least, most)


def test_qwen_refuses_a_stripe() -> None:
    with pytest.raises(ImageSizeError, match="201 x 1 pixels"):
        SmartResize(32, 65_536, 16_777_216).frame(1, 201)


@pytest.mark.parametrize(("least", "most"), [(16, 8000), (4, 30), (1, 1)])
def test_glm_sizes_equal_transformers(least: int, most: int) -> None:
    from transformers.models.glm5_next.image_processing_pil_glm5_next import smart_resize

    sizing = TokenBudget(28, least, most)
    for height, width in SIZES:
        frame = sizing.frame(height, width)
        expected = smart_resize(2, height, width, min_pixels=least, max_pixels=most)
        assert (frame.height, frame.width) == expected, (height, width)


PROCESSORS = {
    "qwen": (SmartResize(32, 65_536, 200_000), {"patch_size": 16}),
    "glm": (TokenBudget(28, 16, 150), {"min_image_tokens": 16, "max_image_tokens": 150}),
}


@pytest.mark.parametrize("size", [(37, 91), (300, 200), (417, 555), (28, 1800)], ids=str)
@pytest.mark.parametrize("family", PROCESSORS)
def test_pixels_equal_those_of_the_transformers_processor(
    family: str, size: tuple[int, int]
) -> None:
    from transformers.models.glm5_next.image_processing_pil_glm5_next import (
        Glm5NextImageProcessorPil,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizing, options = PROCESSORS[family]
    if isinstance(sizing, SmartResize):
        bounds = {"shortest_edge": sizing.min_pixels, "longest_edge": sizing.max_pixels}
        processor: Any = Qwen2VLImageProcessorPil(size=bounds, **options)
    else:
        processor = Glm5NextImageProcessorPil(**options)
    pixels = noise(*size)
    output = processor(
        Image.open(io.BytesIO(file_of(pixels))),
        do_normalize=False,
        do_rescale=False,
        return_tensors="np",
    )
    assert np.array_equal(merged_patches(fitted(pixels, sizing), processor), output["pixel_values"])


def merged_patches(pixels: npt.NDArray[np.uint8], processor: Any) -> npt.NDArray[np.uint8]:
    """[patches, 3 * 2 * patch * patch] in blocks of 2 x 2 patches, each one over two frames."""
    patch = processor.patch_size
    rows, columns = pixels.shape[0] // patch // 2, pixels.shape[1] // patch // 2
    cut = pixels.reshape(rows, 2, patch, columns, 2, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    flat = np.repeat(cut[:, :, :, :, :, None], 2, axis=5)
    return flat.reshape(rows * columns * 4, -1)


@pytest.mark.parametrize(
    "sizing",
    [
        V41["released"],
        V4["released"],
        SmartResize(32, 65_536, 16_777_216),
        TokenBudget(28, 16, 8000),
    ],
)
def test_low_detail_bounds_the_tokens_and_keeps_small_images(sizing: Sizing) -> None:
    low = framed(sizing, 3000, 4000, "low")
    high = framed(sizing, 3000, 4000, "high")
    assert low.height * low.width < high.height * high.width
    assert low.height * low.width < 1.6 * LOW_DETAIL_PIXELS
    assert framed(sizing, 300, 400, "low") == framed(sizing, 300, 400, "auto")
