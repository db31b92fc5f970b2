"""What is readable in the store, and the longest prefix that a set of groups can restore."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.prefix_hits import Group, longest_hit
from services.kvcache.storage import ObjectKey, object_key

HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class Model:
    """Identity of what a session stores: checkpoint, unit and cache layout together.

    `key_name` enters every object's key: objects of other weights, another unit or another
    layout are never found.
    """

    fingerprint: str
    unit_tokens: int
    groups: tuple[Group, ...]
    key_name: str = field(init=False)

    def __post_init__(self) -> None:
        layout = [(g.group_id, g.kind, g.window_units, g.object_bytes) for g in self.groups]
        identity = repr((self.fingerprint, self.unit_tokens, sorted(layout)))
        digest = hashlib.sha256(identity.encode()).hexdigest()[:32]
        object.__setattr__(self, "key_name", f"warhorse##kv1-{digest}")

    def key(self, group_id: int, unit_hash: bytes) -> ObjectKey:
        """LMCache's key of one object of this model."""
        return object_key(self.key_name, group_id, unit_hash)


class Catalogue:
    """Digests of the readable objects by model and group. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[tuple[str, int], dict[bytes, int]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: ObjectKey) -> bool:
        return self.digest(key) is not None

    def add(self, key: ObjectKey, digest: int) -> None:
        """Make `key` visible to look-ups."""
        with self._lock:
            table = self._tables.setdefault((key.model_name, key.object_group_id), {})
            self._size += key.chunk_hash not in table
            table[key.chunk_hash] = digest

    def discard(self, keys: Sequence[ObjectKey]) -> int:
        """Hide keys; returns how many of them were visible."""
        hidden = 0
        with self._lock:
            for key in keys:
                table = self._tables.get((key.model_name, key.object_group_id), {})
                hidden += table.pop(key.chunk_hash, None) is not None
            self._size -= hidden
        return hidden

    def digest(self, key: ObjectKey) -> int | None:
        """The writer's digest; None when the object is not visible."""
        return self._tables.get((key.model_name, key.object_group_id), {}).get(key.chunk_hash)

    def keys(self, names: set[str] | None = None) -> list[ObjectKey]:
        """Keys of the models with these key names, or of all."""
        with self._lock:
            return [
                object_key(name, group_id, unit_hash)
                for (name, group_id), table in self._tables.items()
                if names is None or name in names
                for unit_hash in table
            ]

    def hit_units(self, model: Model, unit_hashes: Sequence[bytes], first_unit: int = 0) -> int:
        """Longest prefix of units that every group can restore.

        The client holds the objects of the units before `first_unit`.
        """
        tables = {
            g.group_id: self._tables.get((model.key_name, g.group_id), {}) for g in model.groups
        }
        return longest_hit(
            model.groups,
            len(unit_hashes),
            lambda group, unit: unit < first_unit or unit_hashes[unit] in tables[group.group_id],
        )
