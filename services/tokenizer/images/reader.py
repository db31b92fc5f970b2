"""The images of a request: from their URLs to published pictures and tokens of the prompt."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.tokenizer.images.decode import DecodeLimits, ImageDecoder
from services.tokenizer.images.errors import ImageError
from services.tokenizer.images.fetch import FetchLimits, ImageFetcher
from services.tokenizer.images.publish import CacheLimits, Picture, PictureStore
from services.tokenizer.images.rules import ImageRules
from services.tokenizer.images.source import data_of, is_data_url
from services.tokenizer.rendering.conversation import ImagePart, refuse

# Known files, by the digest of their bytes and the detail asked for; 64 bytes each.
_MAX_FILES = 16_384


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What requests may ask for. per_request: images; 0 takes none. fetching: None allows data
    URLs only. max_bytes: of one image file."""

    per_request: int = 32
    max_bytes: int = 20 << 20
    decoding: DecodeLimits = field(default_factory=DecodeLimits)
    fetching: FetchLimits | None = None
    caching: CacheLimits = field(default_factory=CacheLimits)
    workers: int = 2


class ImageReader:
    """Reads, sizes and publishes images. Belongs to one event loop.

    Pictures that were seen before, in this request or in an earlier one, are not decoded again.
    """

    def __init__(
        self,
        rules: ImageRules,
        limits: ImageLimits,
        store: PictureStore,
        fetcher: ImageFetcher | None = None,
    ) -> None:
        """store: belongs to the caller. fetcher: None makes one where the limits allow URLs."""
        self._rules = rules
        self._limits = limits
        self._store = store
        if fetcher is None and limits.fetching is not None:
            fetcher = ImageFetcher(limits.fetching)
        self._fetcher = fetcher
        self._decoder = ImageDecoder(rules.sizing, limits.decoding, limits.workers)
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()

    def check(self, images: Sequence[ImagePart]) -> None:
        """Refuse a request with too many images. Raises ServiceError naming the first surplus."""
        limit = self._limits.per_request
        if len(images) > limit:
            raise refuse(
                f"a request may hold at most {limit} images, got {len(images)}",
                images[limit].where,
            )

    async def read(self, images: Sequence[ImagePart]) -> list[Picture]:
        """Return a picture per image. Raises ServiceError naming the first one at fault."""
        unique = {(image.url, image.detail): image for image in reversed(images)}
        results = await asyncio.gather(*map(self._one, unique.values()), return_exceptions=True)
        outcomes = dict(zip(unique, results, strict=True))
        pictures = []
        for image in images:
            outcome = outcomes[image.url, image.detail]
            if isinstance(outcome, BaseException):
                raise outcome
            pictures.append(outcome)
        return pictures

    def tokens(self, picture: Picture, offset: int) -> list[int]:
        """Return the prompt tokens of a picture whose first one has position `offset`."""
        return self._rules.layout.tokens(picture.height, picture.width, offset)

    async def close(self) -> None:
        """End workers and connections."""
        await self._decoder.close()
        if self._fetcher is not None:
            await self._fetcher.close()

    async def _one(self, image: ImagePart) -> Picture:
        try:
            data = await self._bytes(image.url)
            return await self._picture(data, image.detail)
        except ImageError as error:
            raise refuse(str(error), image.where) from error

    async def _bytes(self, url: str) -> bytes:
        if is_data_url(url):
            return await asyncio.to_thread(data_of, url, self._limits.max_bytes)
        if self._fetcher is None:
            raise ImageError("only data URLs are allowed for images here")
        return await self._fetcher.fetch(url)

    async def _picture(self, data: bytes, detail: str) -> Picture:
        key = await asyncio.to_thread(_file_key, data, detail)
        digest = self._digests.get(key)
        known = self._store.find(digest) if digest is not None else None
        if known is not None:
            return replace(known, kept=True)
        picture = await self._store.publish(await self._decoder.decode(data, detail))
        self._digests[key] = picture.digest
        if len(self._digests) > _MAX_FILES:
            self._digests.popitem(last=False)
        return picture


def _file_key(data: bytes, detail: str) -> bytes:
    return hashlib.blake2b(data, digest_size=32, person=detail.encode()).digest()
