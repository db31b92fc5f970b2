"""What both ends of a ring share: the memory file's layout, doorbells, liveness, counters.

Layout of the memory file (words are native u64, each group on cache lines of its own):

====================  =====================================================================
header page           geometry, positions, idle flags, end states, counters
cell records          4 words a cell: sequence, bytes and flags, message bytes, send time
cell payloads         `cells * cell_bytes`, contiguous
====================  =====================================================================

Every word has one writer. Python has no memory fences, so `RingMemory.fence` takes and releases a
lock between the stores and loads whose order matters (an atomic read-modify-write, a full fence on
x86-64).
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from services.common.memory import (
    PAGE_BYTES,
    SIZE_SEALS,
    Mapping,
    add_seals,
    make_memfd,
    prefault,
    reopen,
    round_up,
    seals_of,
)

Role = Literal["producer", "consumer"]

POISON = 0xA5
# A sleep lasts at most this long before the sleeper looks around again.
SLICE_SECONDS = 0.1

RECORD_WORDS = 4
FIRST, LAST = 1, 2  # flags of a run within its message

# Word indices in the header page; 8 words are one cache line.
W_HEAD, W_CONSUMER_IDLE, W_TAIL, W_PRODUCER_IDLE = 8, 16, 32, 40
W_SENT, W_SENT_BYTES, W_FULL_WAITS = 56, 57, 58
W_RECEIVED, W_RECEIVED_BYTES, W_HOP_NS, W_HOP_MAX_NS = 64, 65, 66, 67
_W_MAGIC, _W_CELLS, _W_CELL_BYTES, _W_FILE_BYTES = 0, 1, 2, 3
_W_STATE: dict[Role, int] = {"consumer": 24, "producer": 48}
_LOCK_BYTE: dict[Role, int] = {"consumer": 0, "producer": 1}
_OTHER: dict[Role, Role] = {"consumer": "producer", "producer": "consumer"}

_MAGIC = int.from_bytes(b"WHRING01", "little")
_PAGE_WORDS = PAGE_BYTES // 8
_ABSENT, _ATTACHED, _CLOSED = 0, 1, 2
_POLL_LIVENESS_SECONDS = 0.05


class RingError(Exception):
    """The ring cannot be used as asked."""


@dataclass(frozen=True, slots=True)
class RingStats:
    """Counters of both ends since the ring was made; hop = from `send` to the end of `receive`."""

    sent: int
    sent_bytes: int
    received: int
    received_bytes: int
    hop_seconds_total: float
    hop_seconds_max: float
    full_waits: int


class Bell:
    """An eventfd and the idle flag by which its sleeper says that it wants to be rung."""

    def __init__(self, words: memoryview, flag: int, fd: int) -> None:
        self.fd = fd
        self._words = words
        self._flag = flag
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def ring_if_idle(self) -> None:
        """For the other side; fence before."""
        if self._words[self._flag]:
            self.ring()

    def ring(self) -> None:
        """Make the descriptor readable."""
        with suppress(BlockingIOError):  # rung 2**64 - 2 times and never read
            os.eventfd_write(self.fd, 1)

    def arm(self) -> None:
        """For the sleeper: forget earlier rings and ask for one. Fence and look again after."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        self._words[self._flag] = 1

    def disarm(self) -> None:
        """For the sleeper: awake."""
        if self._words[self._flag]:
            self._words[self._flag] = 0

    def sleep(self, seconds: float) -> None:
        """Wait for a ring, at most `seconds`."""
        self._poll.poll(max(0.0, seconds) * 1000)


class RingMemory:
    """One process's view of a ring. Owns its descriptors and the mapping."""

    def __init__(self, fds: Sequence[int], *, poison: bool) -> None:
        """Takes over `fds`: memory file, data doorbell, space doorbell.

        Raises ValueError when the file is not a sealed ring; the descriptors then stay the
        caller's.
        """
        self.fds = tuple(fds)
        self.poison = poison
        self._mapping = _map_checked(self.fds[0])
        self.words = self._mapping.view.cast("Q")
        self.cells, self.cell_bytes = self.words[_W_CELLS], self.words[_W_CELL_BYTES]
        self.capacity = self.cells * self.cell_bytes
        start = _payload_start(self.cells)
        self.payload = self._mapping.view[start : start + self.capacity]
        self.data_bell = Bell(self.words, W_CONSUMER_IDLE, self.fds[1])
        self.space_bell = Bell(self.words, W_PRODUCER_IDLE, self.fds[2])
        self._lock = threading.Lock()

    def fence(self) -> None:
        """Order the memory accesses before it against those after it."""
        self._lock.acquire()
        self._lock.release()

    def cells_for(self, nbytes: int) -> int:
        """Cells of a run of `nbytes`; an empty message takes one."""
        return max(1, -(-nbytes // self.cell_bytes))

    def record(self, slot: int) -> int:
        """Index of the first word of a cell's record."""
        return _PAGE_WORDS + slot * RECORD_WORDS

    def stats(self) -> RingStats:
        """Both ends' counters."""
        words = self.words
        return RingStats(
            sent=words[W_SENT],
            sent_bytes=words[W_SENT_BYTES],
            received=words[W_RECEIVED],
            received_bytes=words[W_RECEIVED_BYTES],
            hop_seconds_total=words[W_HOP_NS] / 1e9,
            hop_seconds_max=words[W_HOP_MAX_NS] / 1e9,
            full_waits=words[W_FULL_WAITS],
        )

    def close(self) -> None:
        """Unmap and close the descriptors."""
        self.payload.release()
        self.words.release()
        self._mapping.close()
        for fd in self.fds:
            os.close(fd)


class Presence:
    """Takes one end of a ring for good and watches the other end.

    Each end holds a lock on one byte of the memory file through a file description of its own; the
    kernel drops it however the process ends, and across process-id namespaces.
    """

    def __init__(self, memory: RingMemory, role: Role) -> None:
        """Raises RingError when the end is taken or was used before."""
        self._words = memory.words
        self._memory = memory
        self._own, self._peer = _W_STATE[role], _W_STATE[_OTHER[role]]
        self._peer_byte = _LOCK_BYTE[_OTHER[role]]
        self._trust_until = 0.0
        self._fd = reopen(memory.fds[0], os.O_RDWR)
        if not _try_lock(self._fd, _LOCK_BYTE[role]) or self._words[self._own] != _ABSENT:
            os.close(self._fd)
            raise RingError(f"this ring already has or had a {role}")
        self._words[self._own] = _ATTACHED

    def peer_closed(self) -> bool:
        """Whether the other side said goodbye; costs one load."""
        return bool(self._words[self._peer] == _CLOSED)

    def peer_gone(self, *, polling: bool = False) -> bool:
        """Whether the other side closed or died. A polling caller has the kernel asked rarely."""
        state = self._words[self._peer]
        if state != _ATTACHED:
            return bool(state == _CLOSED)
        if polling:
            now = time.monotonic()
            if now < self._trust_until:
                return False
            self._trust_until = now + _POLL_LIVENESS_SECONDS
        return not _is_locked(self._fd, self._peer_byte)

    def leave(self) -> None:
        """Say goodbye; the caller rings the other side's bell after."""
        self._words[self._own] = _CLOSED
        self._memory.fence()
        os.close(self._fd)


def make_ring_fds(cells: int, cell_bytes: int, *, poison: bool) -> tuple[int, int, int]:
    """New memory file and doorbells, formatted and sealed. The caller owns them."""
    if cells < 2 or cell_bytes < 64 or cell_bytes % 64:
        raise ValueError(
            f"a ring needs at least 2 cells of a multiple of 64 bytes, not {cells} of {cell_bytes}"
        )
    nbytes = round_up(_payload_start(cells) + cells * cell_bytes, PAGE_BYTES)
    fds = [make_memfd("ring", nbytes)]
    try:
        _format(fds[0], cells, cell_bytes, nbytes, poison=poison)
        fds += [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)]
    except BaseException:
        close_all(fds)
        raise
    return fds[0], fds[1], fds[2]


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def _format(fd: int, cells: int, cell_bytes: int, nbytes: int, *, poison: bool) -> None:
    add_seals(fd, SIZE_SEALS | fcntl.F_SEAL_SEAL)
    mapping = Mapping(fd, nbytes, writable=True)
    prefault(mapping, fd)
    with mapping.view[:PAGE_BYTES] as page, page.cast("Q") as words:
        words[_W_CELLS], words[_W_CELL_BYTES] = cells, cell_bytes
        words[_W_FILE_BYTES] = nbytes
        words[W_CONSUMER_IDLE] = 1  # an event loop may wait before its first receive
        words[_W_MAGIC] = _MAGIC
    if poison:
        start = _payload_start(cells)
        mapping.view[start:nbytes] = bytes([POISON]) * (nbytes - start)
    mapping.close()


def _map_checked(fd: int) -> Mapping:
    nbytes = os.fstat(fd).st_size
    if nbytes < PAGE_BYTES or seals_of(fd) & SIZE_SEALS != SIZE_SEALS:
        raise ValueError("the descriptor is not a sealed ring")
    mapping = Mapping(fd, nbytes, writable=True)
    with mapping.view[:PAGE_BYTES] as page, page.cast("Q") as words:
        cells, cell_bytes = words[_W_CELLS], words[_W_CELL_BYTES]
        good = words[_W_MAGIC] == _MAGIC and words[_W_FILE_BYTES] == nbytes
    if not good or _payload_start(cells) + cells * cell_bytes > nbytes:
        mapping.close()
        raise ValueError("the memory file does not hold a ring")
    return mapping


def _payload_start(cells: int) -> int:
    return round_up(PAGE_BYTES + cells * RECORD_WORDS * 8, PAGE_BYTES)


def _flock(byte: int) -> bytes:
    """struct flock of fcntl(2): type, whence, start, length, pid (0: a description's lock)."""
    return struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)


def _try_lock(fd: int, byte: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(byte))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_locked(fd: int, byte: int) -> bool:
    kind: int = struct.unpack_from("h", fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(byte)))[0]
    return kind != fcntl.F_UNLCK
