"""Pixels handed to engines: inline when small, else in regions that this process keeps a while."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from warhorse.v1 import common_pb2, tensor_pb2, tokenizer_pb2

from services.common.broker import RegionBroker
from services.common.errors import ServiceError
from services.common.images import image_digest
from services.common.shm import Region

INLINE_BYTES = 64 << 10
_TAG = "image"
# A region takes two descriptors here: its own and the one that the broker hands out.
_DESCRIPTORS_PER_REGION = 2
_OTHER_DESCRIPTORS = 256
_MAX_REGIONS = 4096
_MIN_REGIONS = 32


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Bounds of what is kept. min_seconds: how long a picture that was just used stays for sure."""

    max_bytes: int = 512 << 20
    min_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Picture:
    """A published image: size in pixels, digest, and the reference that an engine opens.

    `kept`: it was here before, so that its file was not decoded.
    """

    height: int
    width: int
    digest: bytes
    reference: tokenizer_pb2.ImageInput
    kept: bool = field(default=False, compare=False)

    def placed(self, offset: int, length: int) -> tokenizer_pb2.ImageInput:
        """The message for prompt tokens `offset` to `offset + length`."""
        message = tokenizer_pb2.ImageInput()
        message.CopyFrom(self.reference)
        message.offset, message.length = offset, length
        return message


@dataclass(slots=True)
class _Kept:
    picture: Picture
    region: Region | None
    nbytes: int
    used_at: float


class PictureStore:
    """Owns the regions of the pictures, least recently used first out. One event loop.

    Regions and bytes are bounded; a picture used within `min_seconds` is never dropped, so when all
    are that young a new one is refused for the moment.
    """

    def __init__(
        self,
        broker: RegionBroker,
        owner: str,
        limits: CacheLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """broker: hands out the regions; it belongs to the caller. owner: name in the regions."""
        self._broker = broker
        self._owner = owner
        self._limits = limits
        self._clock = clock
        self._max_regions = _affordable_regions()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all pictures."""
        return sum(kept.nbytes for kept in self._kept.values())

    @property
    def regions(self) -> int:
        """Number of open regions."""
        return sum(kept.region is not None for kept in self._kept.values())

    def find(self, digest: bytes) -> Picture | None:
        """A kept picture, which counts as used now."""
        kept = self._kept.get(digest)
        if kept is None:
            return None
        self._kept.move_to_end(digest)
        kept.used_at = self._clock()
        return kept.picture

    async def publish(self, pixels_HW3: npt.NDArray[np.uint8]) -> Picture:  # noqa: N803
        """Keep pixels and return their picture. Raises ServiceError POOL_EXHAUSTED."""
        digest = await asyncio.to_thread(image_digest, pixels_HW3)
        known = self.find(digest)
        if known is not None:
            return known
        region = None
        if pixels_HW3.nbytes > INLINE_BYTES:
            region = await self._filled(pixels_HW3)
        try:
            known = self.find(digest)  # perhaps somebody else was faster
            if known is None:
                self._make_room(pixels_HW3.nbytes)
                known, region = self._keep(pixels_HW3, digest, region), None
            return known
        finally:
            if region is not None:
                region.close()

    def close(self) -> None:
        """Drop all pictures; engines that have opened one keep it."""
        while self._kept:
            self._drop_oldest()

    def _keep(
        self,
        pixels_HW3: npt.NDArray[np.uint8],  # noqa: N803
        digest: bytes,
        region: Region | None,
    ) -> Picture:
        height, width, _ = pixels_HW3.shape
        tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_U8, shape=pixels_HW3.shape)
        reference = tokenizer_pb2.ImageInput(digest=digest)
        if region is None:
            tensor.inline = pixels_HW3.tobytes()
        else:
            reference.region.CopyFrom(self._broker.publish(region))
            tensor.shm.region_id, tensor.shm.generation = region.region_id, region.generation
            tensor.shm.nbytes = region.nbytes
        reference.pixels.CopyFrom(tensor)
        picture = Picture(height, width, digest, reference)
        self._kept[digest] = _Kept(picture, region, pixels_HW3.nbytes, self._clock())
        return picture

    async def _filled(self, pixels_HW3: npt.NDArray[np.uint8]) -> Region:  # noqa: N803
        try:
            return await asyncio.to_thread(_sealed, pixels_HW3, self._owner)
        except MemoryError:
            raise self._no_room() from None

    def _make_room(self, nbytes: int) -> None:
        while self._kept and not self._fits(nbytes):
            oldest = next(iter(self._kept.values()))
            if self._clock() - oldest.used_at < self._limits.min_seconds:
                raise self._no_room()
            self._drop_oldest()
        if not self._fits(nbytes):
            raise self._no_room()

    def _fits(self, nbytes: int) -> bool:
        room = self.nbytes + nbytes <= self._limits.max_bytes
        return room and self.regions < self._max_regions

    def _drop_oldest(self) -> None:
        _, kept = self._kept.popitem(last=False)
        if kept.region is not None:
            self._broker.retire(kept.region)
            kept.region.close()

    def _no_room(self) -> ServiceError:
        return ServiceError(
            common_pb2.ERROR_REASON_POOL_EXHAUSTED,
            "there is no room for more images at the moment",
            retry_after=max(1.0, self._limits.min_seconds / 4),
        )


def _sealed(pixels_HW3: npt.NDArray[np.uint8], owner: str) -> Region:  # noqa: N803
    region = Region.create(pixels_HW3.nbytes, owner=owner, read_only_after=True, tag=_TAG)
    region.view[:] = pixels_HW3.reshape(-1).data
    region.seal_read_only()
    return region


def _affordable_regions() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    affordable = (soft - _OTHER_DESCRIPTORS) // _DESCRIPTORS_PER_REGION
    return min(_MAX_REGIONS, max(_MIN_REGIONS, affordable))
