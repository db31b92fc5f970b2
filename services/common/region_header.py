"""The first page of every region: what it is, whose, how large, and which life of it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from services.common.memory import PAGE_BYTES

HEADER_BYTES = PAGE_BYTES
READY, FILLING = 1, 0

_MAGIC = b"WHREGION"
_VERSION = 1
# magic, version, header bytes, state, generation, data bytes, file bytes, id, owner, tag.
_FORMAT = struct.Struct("<8sIIQQQQ32s64s128s")


class RegionMismatch(Exception):  # noqa: N818  (named for what is the case)
    """A memory file is not the region that was asked for. The message is for logs, not clients."""


@dataclass(frozen=True, slots=True)
class RegionHeader:
    """Contents of the header page. Sizes in bytes; `tag` says what the data is (a fingerprint)."""

    region_id: str
    generation: int
    nbytes: int
    file_bytes: int
    owner: str
    tag: str = ""
    state: int = FILLING

    def pack(self) -> bytes:
        """The header's bytes, at most one page. Raises ValueError when a text is too long."""
        return _FORMAT.pack(
            _MAGIC,
            _VERSION,
            HEADER_BYTES,
            self.state,
            self.generation,
            self.nbytes,
            self.file_bytes,
            _fixed(self.region_id, 32, "region id"),
            _fixed(self.owner, 64, "owner"),
            _fixed(self.tag, 128, "tag"),
        )

    @classmethod
    def unpack(cls, page: memoryview | bytes) -> RegionHeader:
        """Read a header; raises RegionMismatch when the page holds none of this version."""
        fields = _FORMAT.unpack_from(page)
        magic, version, header_bytes, state, generation, nbytes, file_bytes = fields[:7]
        if magic != _MAGIC:
            raise RegionMismatch("the memory file is not a region")
        if version != _VERSION or header_bytes != HEADER_BYTES:
            raise RegionMismatch(f"the region has header version {version}, expected {_VERSION}")
        region_id, owner, tag = (field.rstrip(b"\0").decode() for field in fields[7:])
        return cls(region_id, generation, nbytes, file_bytes, owner, tag, state)


def _fixed(text: str, size: int, what: str) -> bytes:
    raw = text.encode()
    if len(raw) > size or b"\0" in raw:
        raise ValueError(f"{what} has {len(raw)} bytes, at most {size} without zeros are possible")
    return raw
