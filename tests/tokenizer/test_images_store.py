"""Published pictures: what engines see, and that nothing stays behind."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from warhorse.v1 import common_pb2

from services.common.broker import RegionBroker
from services.common.errors import ServiceError
from services.common.images import image_digest
from services.common.shm import open_region, region_counts
from services.tokenizer.images.publish import INLINE_BYTES, CacheLimits, Picture, PictureStore
from tests.tokenizer.pictures import noise

SIDE = 200
BYTES = SIDE * SIDE * 3
assert BYTES > INLINE_BYTES


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="wh-"))
    (path / "tokenizer").mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(run_dir: Path, clock: Clock) -> Iterator[PictureStore]:
    before = region_counts()
    broker = RegionBroker(run_dir / "tokenizer" / "t.fd", "t")
    store = PictureStore(broker, "t", CacheLimits(3 * BYTES, 60.0), clock)
    yield store
    store.close()
    broker.close()
    assert region_counts() == before


def opened(picture: Picture, run_dir: Path) -> np.ndarray:
    pixels = picture.reference.pixels
    with open_region(picture.reference.region, run_dir) as region:
        assert (pixels.shm.region_id, pixels.shm.generation) == (
            region.region_id,
            region.generation,
        )
        assert pixels.shm.nbytes == region.nbytes
        with pytest.raises(TypeError):
            region.view[0] = 1
        return np.array(region.array(np.uint8)).reshape(pixels.shape)


async def test_large_picture_lies_in_a_sealed_region(store: PictureStore, run_dir: Path) -> None:
    pixels = noise(SIDE, SIDE)
    picture = await store.publish(pixels)
    assert np.array_equal(opened(picture, run_dir), pixels)
    assert picture.placed(7, 30).offset == 7 and picture.placed(7, 30).length == 30
    assert picture.reference.pixels.WhichOneof("payload") == "shm"


async def test_small_picture_travels_inline(store: PictureStore) -> None:
    pixels = noise(100, 200)
    picture = await store.publish(pixels)
    assert picture.reference.pixels.inline == pixels.tobytes()
    assert list(picture.reference.pixels.shape) == [100, 200, 3]
    assert not picture.reference.HasField("region") and store.regions == 0


async def test_equal_pixels_share_one_region(store: PictureStore) -> None:
    first, second = await store.publish(noise(SIDE, SIDE)), await store.publish(noise(SIDE, SIDE))
    assert first is second and store.regions == 1


async def test_oldest_picture_goes_first_and_only_after_its_time(
    store: PictureStore, clock: Clock, run_dir: Path
) -> None:
    first, second, _ = [await store.publish(noise(SIDE, SIDE, seed)) for seed in range(3)]
    with pytest.raises(ServiceError) as refused:
        await store.publish(noise(SIDE, SIDE, 3))
    assert refused.value.reason == common_pb2.ERROR_REASON_POOL_EXHAUSTED
    assert store.find(first.digest) is first and store.nbytes == 3 * BYTES
    clock.now += 61
    assert store.find(first.digest) is first
    await store.publish(noise(SIDE, SIDE, 3))
    assert store.find(second.digest) is None and store.find(first.digest) is first
    with pytest.raises(ServiceError) as gone:
        opened(second, run_dir)
    assert gone.value.reason == common_pb2.ERROR_REASON_STALE_GENERATION


async def test_region_count_is_bounded_over_many_pictures(
    store: PictureStore, clock: Clock
) -> None:
    idle = region_counts()
    for seed in range(40):
        clock.now += 61
        await store.publish(noise(SIDE, SIDE, seed))
        assert store.nbytes <= 3 * BYTES
    assert store.regions == 3 and region_counts()[0] - idle[0] == 3


async def test_picture_beyond_the_whole_budget_is_refused(store: PictureStore) -> None:
    with pytest.raises(ServiceError) as refused:
        await store.publish(noise(2 * SIDE, 2 * SIDE))
    assert refused.value.reason == common_pb2.ERROR_REASON_POOL_EXHAUSTED


def test_digest_covers_size_and_pixels() -> None:
    pixels = noise(4, 6)
    expected = hashlib.blake2b(
        (4).to_bytes(4, "little") + (6).to_bytes(4, "little") + pixels.tobytes(), digest_size=32
    )
    assert image_digest(pixels) == expected.digest()
    assert image_digest(pixels.reshape(6, 4, 3)) != image_digest(pixels)
    changed = pixels.copy()
    changed[3, 5, 2] ^= 1
    assert image_digest(changed) != image_digest(pixels)
    with pytest.raises(ValueError, match="uint8"):
        image_digest(pixels[:, :, :2])
