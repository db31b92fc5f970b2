"""What checkpoints say about images, and how a request's images are read by it."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.common.broker import RegionBroker
from services.common.errors import ServiceError, StartupError
from services.tokenizer.images.deepseek import DeepSeekV4Sizing, DeepSeekV41Sizing
from services.tokenizer.images.publish import CacheLimits, PictureStore
from services.tokenizer.images.reader import ImageLimits, ImageReader
from services.tokenizer.images.rules import ImageRules, rules_of
from services.tokenizer.images.sizing import SmartResize, TokenBudget
from services.tokenizer.rendering.conversation import Conversation, ImagePart, Message, PastCall
from services.tokenizer.rendering.rules import PlainRules
from services.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.pictures import file_of, noise, url_of
from tests.tokenizer.support import byte_level_definition, vocabulary

IMAGE = vocabulary().control["<|object_ref_start|>"]
V4 = {
    "model_type": "deepseek_v4",
    "vocab_size": 129_280,
    "vision_n_layers": 32,
    "vision_patch_size": 14,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 384,
    "vision_min_pixels": 147_456,
    "vision_max_wh_ratio": 8,
}
V41 = {
    "model_type": "deepseek_v41",
    "image_token_id": 129_264,
    "vision_config": {
        "patch_size": 14,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295_936,
        "max_wh_ratio": None,
    },
}
QWEN = {
    "model_type": "qwen3_5",
    "image_token_id": IMAGE,
    "vision_config": {"patch_size": 16, "spatial_merge_size": 2},
}
GLM = {
    "model_type": "glm5_next",
    "image_token_id": IMAGE,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
}


def rules(config: dict[str, Any], processor: dict[str, Any] | None = None) -> ImageRules:
    found = rules_of(config, processor or {}, vocabulary())
    assert found is not None
    return found


def test_vision_exp_reads_its_flat_fields() -> None:
    found = rules(V4)
    assert found.sizing == DeepSeekV4Sizing(14, 3, 384, 147_456, 8)
    assert found.placeholder is None
    ids = found.layout.tokens(42, 42, 0)
    assert (min(ids), max(ids)) == (129_257, 129_261)


def test_v41_reads_its_vision_config() -> None:
    found = rules(V41)
    assert found.sizing == DeepSeekV41Sizing(14, 3, 1024, 295_936, None)
    assert found.layout.tokens(42, 84, 0) == [129_264] * 5


def test_qwen_reads_pixels_from_the_processor_or_takes_the_published_ones() -> None:
    assert rules(QWEN).sizing == SmartResize(32, 65_536, 16_777_216)
    size = {"size": {"shortest_edge": 4096, "longest_edge": 8192}}
    assert rules(QWEN, size).sizing == SmartResize(32, 4096, 8192)
    old = {"min_pixels": 4096, "max_pixels": 8192}
    assert rules(QWEN, old).sizing == SmartResize(32, 4096, 8192)
    assert rules(QWEN).placeholder == "<|object_ref_start|>"
    assert rules(QWEN).layout.tokens(64, 96, 3) == [IMAGE] * 6


def test_glm_reads_tokens_from_the_processor_or_takes_the_published_ones() -> None:
    assert rules(GLM).sizing == TokenBudget(28, 16, 8000)
    bounds = {"min_image_tokens": 4, "max_image_tokens": 64}
    assert rules(GLM, bounds).sizing == TokenBudget(28, 4, 64)
    assert rules(GLM).layout.tokens(28, 56, 0) == [IMAGE] * 2


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_5", "image_token_id": IMAGE},
        {**V4, "vision_n_layers": 0},
        {"model_type": "something", "vision_config": {"patch_size": 14}},
        {},
    ],
)
def test_checkpoint_without_a_known_tower_takes_no_images(config: dict[str, Any]) -> None:
    assert rules_of(config, {}, vocabulary()) is None


def test_tokenizer_without_the_image_token_takes_none_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert rules_of({**QWEN, "image_token_id": 5}, {}, vocabulary()) is None
    assert "lacks the image token" in caplog.text


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**V4, "vision_patch_size": 0}, "vision_patch_size"),
        ({**V4, "vision_max_n_token": "384"}, "vision_max_n_token"),
        ({**V41, "vision_config": {"patch_size": 14}}, "downsample_ratio"),
        ({**QWEN, "vision_config": {"patch_size": True}}, "patch_size"),
    ],
)
def test_wrong_field_ends_the_start_with_its_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(StartupError, match=field):
        rules_of(config, {}, Vocabulary(byte_level_definition()))


@pytest.fixture
async def reader() -> AsyncIterator[ImageReader]:
    run_dir = Path(tempfile.mkdtemp(prefix="wh-"))
    (run_dir / "tokenizer").mkdir()
    broker = RegionBroker(run_dir / "tokenizer" / "t.fd", "t")
    store = PictureStore(broker, "t", CacheLimits(64 << 20, 60.0))
    size = {"size": {"shortest_edge": 1024, "longest_edge": 1 << 20}}
    reader = ImageReader(rules(QWEN, size), ImageLimits(per_request=3, workers=1), store)
    yield reader
    await reader.close()
    store.close()
    broker.close()
    shutil.rmtree(run_dir)


def part(seed: int, index: int, detail: str = "auto") -> ImagePart:
    url = url_of(file_of(noise(64, 64, seed)))
    return ImagePart(url, detail, f"messages.0.content.{index}.image_url")


async def test_image_is_decoded_once_however_often_it_comes(
    reader: ImageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    decode = reader._decoder.decode

    async def counting(data: bytes, detail: str) -> Any:
        decoded.append(detail)
        return await decode(data, detail)

    monkeypatch.setattr(reader._decoder, "decode", counting)
    one, other, again = await reader.read([part(1, 0), part(2, 1), part(1, 2)])
    assert one is again and one.digest != other.digest and len(decoded) == 2
    assert await reader.read([part(2, 0)]) == [other] and len(decoded) == 2
    assert await reader.read([part(2, 0, "low")]) == [other] and decoded[2:] == ["low"]


async def test_first_image_at_fault_is_named(reader: ImageReader) -> None:
    bad = [ImagePart(url, "auto", f"part {i}") for i, url in enumerate(("x:", "data:,", "data:"))]
    with pytest.raises(ServiceError) as refused:
        await reader.read([part(1, 0), *bad])
    assert refused.value.field == "part 0" and "only data URLs" in refused.value.message


async def test_surplus_image_is_named(reader: ImageReader) -> None:
    reader.check([part(1, i) for i in range(3)])
    with pytest.raises(ServiceError) as refused:
        reader.check([part(1, i) for i in range(5)])
    assert refused.value.field == "messages.0.content.3.image_url"


def test_results_with_images_come_in_the_order_of_their_calls() -> None:
    calls = tuple(PastCall(name, "look", "{}") for name in ("a", "b"))
    results = [Message("tool", (part(i, i),), call_id=name) for i, name in enumerate(("b", "a"))]
    history = Conversation((Message("assistant", calls=calls), *results))
    prepared = PlainRules().prepare(history)
    assert prepared.images() == (results[1].parts[0], results[0].parts[0])
    texts = [Message("tool", (name,), call_id=name) for name in ("b", "a")]
    kept = Conversation((Message("assistant", calls=calls), *texts))
    assert PlainRules().prepare(kept) == kept
