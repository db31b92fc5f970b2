"""LMCache's storage manager over an arena that this service owns.

The one module that knows LMCache (0.5.6). It uses more than LMCache's public face: the internal
injection point of `StorageManager` for an L1 manager, `L1Manager._memory_manager`, the write tag
of the storage manager and the policy of its eviction controller. tests/kvcache/test_storage.py
holds the contract of each, so that an upgrade fails there first.

What LMCache does: placing objects, their states (staged, resident, read-locked), recency and the
choice of what to evict, hand-over to L2 tiers. What it does not do and is done here: an arena
that another process can map by descriptor, eviction at the moment of need, aborting, locks that
never expire by time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

os.environ["LMCACHE_TRACK_USAGE"] = "false"  # read by LMCache when it is imported
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

import torch
from lmcache.v1.distributed.api import (
    L1BackendType,
    MemoryLayoutDesc,
    ObjectKey,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
    get_configured_capacity_bytes,
)
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.internal_api import (
    L1ManagerListener,
    L1MemoryDesc,
)
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.storage_manager import (
    _L1_WRITE_TAG,
    StorageManager,
)
from lmcache.v1.memory_allocators.tensor_memory_allocator import (
    TensorMemoryAllocator,
)

__all__ = ["ArenaStorage", "EvictionPolicyName", "ObjectKey", "Slot", "StorageConfig", "object_key"]

# LMCache's locks expire by time; ours end with their owner, so theirs must never fire.
_NEVER_SECONDS = 10 * 365 * 24 * 3600

EvictionPolicyName = Literal["LRU", "ARC", "noop"]


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Settings of the arena; names and meaning as in LMCache's server flags."""

    align_bytes: int = 4096
    eviction_policy: EvictionPolicyName = "LRU"
    eviction_trigger_watermark: float = 0.8
    eviction_ratio: float = 0.2

    def __post_init__(self) -> None:
        if self.align_bytes < 256 or self.align_bytes & (self.align_bytes - 1):
            raise ValueError(
                f"l1_align_bytes {self.align_bytes} must be a power of two of at least 256"
            )
        for name in ("eviction_trigger_watermark", "eviction_ratio"):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name} {value} must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an object lies in the arena, bytes."""

    offset: int
    nbytes: int


def object_key(model: str, group_id: int, unit_hash: bytes) -> ObjectKey:
    """LMCache's key of one object. `model` names checkpoint and cache layout, without "@"."""
    return ObjectKey(chunk_hash=unit_hash, model_name=model, kv_rank=0, object_group_id=group_id)


class ArenaStorage:
    """Owns what lies where in the arena. One caller thread; LMCache's own threads may evict.

    `arena` is uint8 [capacity] and must outlive this object. `on_removed` is called with the keys
    that left the store, by eviction, `remove` or `abort`, from whichever thread removed them.
    """

    def __init__(
        self,
        arena: npt.NDArray[np.uint8],
        config: StorageConfig,
        on_removed: Callable[[Sequence[ObjectKey]], None],
    ) -> None:
        _route_lmcache_logs()
        self._arena = arena
        self._sizes: dict[ObjectKey, int] = {}
        manager_config = _manager_config(arena.nbytes, config)
        self._l1 = _RegionL1Manager(manager_config, arena)
        self._manager = StorageManager(
            StorageManagerConfig(manager_config, manager_config.eviction),
            _l1_managers=(self._l1,),
        )
        self._l1.register_listener(_RemovalListener(self._removed))
        self._on_removed = on_removed
        self._removals = 0

    # Writing

    def reserve(self, keys: Sequence[ObjectKey], nbytes: int) -> dict[ObjectKey, Slot | None]:
        """Stage slots of `nbytes` for keys that are neither stored nor staged.

        Keys that are stored or staged already are absent from the answer; None means that the
        arena is full of objects that may not be evicted. Nothing is readable before `commit`.
        """
        layout = MemoryLayoutDesc(shapes=[torch.Size([nbytes])], dtypes=[torch.uint8])
        slots: dict[ObjectKey, Slot | None] = {}
        pending = self._try_reserve(list(keys), layout, nbytes, slots)
        while pending and self._evict(len(pending)):
            pending = self._try_reserve(pending, layout, nbytes, slots)
        for index, key in enumerate(pending):  # room for some, not for all together
            if self._try_reserve([key], layout, nbytes, slots):
                slots.update(dict.fromkeys(pending[index:]))
                break
        return slots

    def commit(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Make staged objects readable; returns the keys that are readable now."""
        done = self._l1.finish_write(list(keys), tag=_L1_WRITE_TAG)
        return [key for key in keys if done[key] == L1Error.SUCCESS]

    def abort(self, keys: Sequence[ObjectKey]) -> None:
        """Free staged slots; their bytes never become readable."""
        done = self._l1.finish_write_and_delete(list(keys), tag=_L1_WRITE_TAG)
        lost = [key for key in keys if done[key] != L1Error.SUCCESS]
        if lost:
            raise RuntimeError(f"{len(lost)} staged objects were not in the store")

    # Reading

    def pin(self, keys: Sequence[ObjectKey]) -> dict[ObjectKey, Slot]:
        """Lock stored objects in place, once more per call; keys not stored are left out."""
        found = self._l1.reserve_read(list(keys))
        slots = {k: self._slot(k, memory) for k, (_, memory) in found.items() if memory is not None}
        self._l1.touch_keys(list(slots))
        return slots

    def unpin(self, keys: Sequence[ObjectKey]) -> None:
        """Release one lock of each key."""
        done = self._l1.finish_read(list(keys))
        lost = [key for key in keys if done[key] != L1Error.SUCCESS]
        if lost:
            raise RuntimeError(f"{len(lost)} pinned objects were not locked in the store")

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Mark keys as just used; the first of them as the most recent."""
        self._l1.touch_keys(list(keys))

    def remove(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Drop stored objects; returns those that stay because somebody reads them."""
        done = self._l1.delete(list(keys))
        return [key for key in keys if done[key] == L1Error.KEY_IS_LOCKED]

    # State

    def bytes_of(self, slot: Slot) -> memoryview:
        """The bytes of a slot, read-only."""
        return self._arena[slot.offset : slot.offset + slot.nbytes].data.toreadonly()

    def usage(self) -> tuple[int, int]:
        """Used and total bytes of the arena, staged objects included."""
        used, total = self._l1.get_memory_usage()
        return int(used), int(total)

    def check(self) -> None:
        """Raise if the allocator's books do not add up."""
        if not self._l1.memcheck():
            raise RuntimeError("the allocator of the arena is inconsistent")

    def close(self) -> None:
        """Stop LMCache's threads and forget every object."""
        self._manager.close()

    # Inside

    def _try_reserve(
        self,
        keys: list[ObjectKey],
        layout: Any,
        nbytes: int,
        slots: dict[ObjectKey, Slot | None],
    ) -> list[ObjectKey]:
        """Add slots of `keys` to `slots`; returns the keys for which there is no room."""
        if not keys:
            return []
        result = self._l1.reserve_write(keys, [False] * len(keys), layout, tag=_L1_WRITE_TAG)
        for key, (_, memory) in result.items():
            if memory is not None:
                slots[key] = Slot(int(memory.meta.address), nbytes)
                self._sizes[key] = nbytes
        return [key for key in keys if result[key][0] == L1Error.OUT_OF_MEMORY]

    def _evict(self, count: int) -> bool:
        """Evict about `count` unlocked objects, least valuable first. False if there is none."""
        known = len(self._sizes)
        if not known:
            return False
        controller = self._manager._eviction_controller
        actions = controller._eviction_policy.get_eviction_actions(
            min(1.0, count / known), key_eligible_filter=self._l1.is_key_evictable
        )
        before = self._removals
        for action in actions:
            controller.execute_eviction_action(action)
        return self._removals > before

    def _slot(self, key: ObjectKey, memory: Any) -> Slot:
        return Slot(int(memory.meta.address), self._sizes[key])

    def _removed(self, keys: list[ObjectKey]) -> None:
        for key in keys:
            self._sizes.pop(key, None)
        self._removals += len(keys)
        self._on_removed(keys)


class _RegionMemory:
    """LMCache's memory manager protocol over the arena."""

    def __init__(self, arena: npt.NDArray[np.uint8], align_bytes: int) -> None:
        self._tensor = torch.from_numpy(arena)
        self._align_bytes = align_bytes
        self._allocator = TensorMemoryAllocator(self._tensor, align_bytes=align_bytes)

    def allocate(self, layout_desc: Any, count: int) -> tuple[Any, list[Any]]:
        """`count` equal objects, or none of them."""
        objects = self._allocator.batched_allocate(layout_desc.shapes, layout_desc.dtypes, count)
        return (L1Error.OUT_OF_MEMORY, []) if objects is None else (L1Error.SUCCESS, objects)

    def free(self, mem_objs: list[Any]) -> Any:
        """Give objects back."""
        self._allocator.batched_free(mem_objs)
        return L1Error.SUCCESS

    def get_memory_usage(self) -> tuple[int, int]:
        """Used and total bytes."""
        addresses = self._allocator.address_manager
        total = addresses.get_heap_size()
        return total - addresses.get_free_size(), total

    def get_backend_type(self, memory_obj: Any) -> Any:
        """Always host memory."""
        return L1BackendType.DRAM

    def get_l1_memory_desc(self) -> Any:
        """The arena, as L2 adapters want to know it."""
        return L1MemoryDesc(
            ptr=self._tensor.data_ptr(), size=self._tensor.numel(), align_bytes=self._align_bytes
        )

    def close(self) -> None:
        """The region belongs to the service."""

    def memcheck(self) -> bool:
        """Whether free and used blocks add up."""
        return bool(self._allocator.memcheck())


class _RegionL1Manager(L1Manager):  # type: ignore[misc]
    """LMCache's L1 manager whose memory is the arena instead of its own allocation."""

    def __init__(self, config: Any, arena: npt.NDArray[np.uint8]) -> None:
        align_bytes = config.memory_config.align_bytes
        super().__init__(_l1_config(align_bytes, align_bytes, config.eviction))
        own: Any = self._memory_manager  # one aligned block, replaced before its first use
        own.close()
        self._memory_manager: Any = _RegionMemory(arena, align_bytes)
        self._config = config
        self._boot_capacity_bytes_by_backend = get_configured_capacity_bytes(config)


class _RemovalListener(L1ManagerListener):  # type: ignore[misc]
    """Tells when objects leave L1. Called under LMCache's lock."""

    def __init__(self, removed: Callable[[list[ObjectKey]], None]) -> None:
        self._removed = removed

    def on_l1_keys_deleted_by_manager(self, keys: list[ObjectKey]) -> None:
        """Objects left the store, or were never committed."""
        if keys:
            self._removed(keys)

    def on_l1_keys_reserved_read(self, keys: list[ObjectKey]) -> None:
        """Of no interest."""

    def on_l1_keys_read_finished(self, keys: list[ObjectKey]) -> None:
        """Of no interest."""

    def on_l1_keys_reserved_write(self, keys: list[ObjectKey]) -> None:
        """Of no interest."""

    def on_l1_keys_write_finished(self, keys: list[ObjectKey]) -> None:
        """Of no interest."""

    def on_l1_keys_finish_write_and_reserve_read(self, keys: list[ObjectKey]) -> None:
        """Of no interest."""

    def on_l1_keys_accessed(self, keys: list[ObjectKey]) -> None:
        """Of no interest."""


def _l1_config(nbytes: int, align_bytes: int, eviction: Any) -> Any:
    memory = L1MemoryManagerConfig(
        size_in_bytes=nbytes, use_lazy=False, align_bytes=align_bytes, shm_name=""
    )
    return L1ManagerConfig(
        memory,
        write_ttl_seconds=_NEVER_SECONDS,
        read_ttl_seconds=_NEVER_SECONDS,
        eviction=eviction,
    )


def _manager_config(nbytes: int, config: StorageConfig) -> Any:
    eviction = EvictionConfig(
        config.eviction_policy,
        trigger_watermark=config.eviction_trigger_watermark,
        eviction_ratio=config.eviction_ratio,
    )
    return _l1_config(nbytes, config.align_bytes, eviction)


def _route_lmcache_logs() -> None:
    """LMCache prints coloured text; send its records to our handlers instead."""
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("lmcache") and isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True
    # A full arena is ordinary here: it is answered by eviction.
    logging.getLogger("lmcache.v1.memory_management").setLevel(logging.ERROR)
