"""Token ids as they travel: packed little-endian uint32."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

BYTES = 4
_CODE = next(code for code in "IL" if array(code).itemsize == BYTES)


def pack(token_ids: Sequence[int]) -> bytes:
    """Ids to bytes, 4 per id."""
    ids = array(_CODE, token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpack(packed: bytes) -> list[int]:
    """Bytes to ids; `packed` must be a multiple of 4 bytes."""
    ids = array(_CODE)
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def count(packed: bytes) -> int:
    """How many ids `packed` holds."""
    return len(packed) // BYTES
