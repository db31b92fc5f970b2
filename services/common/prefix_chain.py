"""Names of prefix units: a chain of 32-byte hashes over everything that the cache depends on."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import NewType, Protocol

UnitHash = NewType("UnitHash", bytes)  # 32 bytes
SHORT_BYTES = 8  # of a hash, where a chance match costs only speed


class Span(Protocol):
    """Tokens of a prompt that stand for an image."""

    @property
    def offset(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def digest(self) -> bytes: ...


def root_hash(fingerprint: str, salt: str) -> UnitHash:
    """Start of the chains of one model and one salt; no unit has this name."""
    digest = hashlib.blake2b(digest_size=32, person=b"warhorse-root")
    for part in (fingerprint.encode(), salt.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return UnitHash(digest.digest())


class HashChain:
    """Hashes of the full units of one growing token list.

    A unit's hash covers the hash before it, its tokens (little-endian u32) and the offset and
    digest of every image that overlaps it, because all images share their placeholder ids.
    """

    def __init__(self, root: UnitHash, unit_tokens: int, images: Sequence[Span] = ()) -> None:
        self.unit_tokens = unit_tokens
        self._images = images
        self._root = root
        self.hashes: list[UnitHash] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the units that `tokens`, the whole list so far, completes."""
        while (len(self.hashes) + 1) * self.unit_tokens <= len(tokens):
            start = len(self.hashes) * self.unit_tokens
            self.hashes.append(self._unit(start, tokens[start : start + self.unit_tokens]))

    def fork(self) -> HashChain:
        """A chain with the same units so far, to grow on its own."""
        chain = HashChain(self._root, self.unit_tokens, self._images)
        chain.hashes = self.hashes.copy()
        return chain

    def parent(self, unit: int) -> UnitHash:
        """Hash before unit number `unit`."""
        return self.hashes[unit - 1] if unit else self._root

    def _unit(self, start: int, tokens: Sequence[int]) -> UnitHash:
        digest = hashlib.blake2b(digest_size=32, person=b"warhorse-unit")
        digest.update(self.parent(start // self.unit_tokens))
        digest.update(_packed(tokens))
        for image in self._images:
            if image.offset < start + len(tokens) and start < image.offset + image.length:
                digest.update((image.offset - start).to_bytes(8, "little", signed=True))
                digest.update(len(image.digest).to_bytes(8, "little"))
                digest.update(image.digest)
        return UnitHash(digest.digest())


def _packed(tokens: Sequence[int]) -> bytes:
    packed = array("I", tokens)
    if packed.itemsize != 4:
        raise RuntimeError(f"array code I holds {packed.itemsize} bytes here, not 4")
    return packed.tobytes()


def short_hashes(packed: bytes) -> Iterator[bytes]:
    """The short hashes that a load record holds behind each other."""
    return (packed[i : i + SHORT_BYTES] for i in range(0, len(packed), SHORT_BYTES))
