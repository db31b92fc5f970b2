"""The two ends of a ring: how messages become runs of cells and back."""

from __future__ import annotations

import os
import time

from services.common.ring_memory import (
    FIRST,
    LAST,
    POISON,
    SLICE_SECONDS,
    W_CONSUMER_IDLE,
    W_FULL_WAITS,
    W_HEAD,
    W_HOP_MAX_NS,
    W_HOP_NS,
    W_RECEIVED,
    W_RECEIVED_BYTES,
    W_SENT,
    W_SENT_BYTES,
    W_TAIL,
    Presence,
    RingError,
    RingMemory,
)

Buffer = bytes | bytearray | memoryview


class RingFull(RingError):  # noqa: N818  (named for what is the case, like queue.Full)
    """No room within the time-out; the message was not delivered and will not be."""


class RingClosed(RingError):  # noqa: N818
    """The other side closed its end or died, and nothing it sent is left to read."""


class Producer:
    """The writing end. `_position` counts cells since the ring was made."""

    def __init__(self, memory: RingMemory) -> None:
        self._memory = memory
        self._words = memory.words
        self._bell = memory.space_bell
        self._presence = Presence(memory, "producer")
        self._position = 0

    def send(self, data: Buffer, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with memoryview(data).cast("B") as view:
            cells = self._memory.cells_for(len(view))
            if cells <= self._memory.cells:
                self._wait_for_space(cells, deadline)
                self._publish(view, 0, len(view))
            else:
                self._send_in_pieces(view, deadline)
            self._count(len(view))

    def try_send(self, data: Buffer) -> bool:
        with memoryview(data).cast("B") as view:
            cells = self._memory.cells_for(len(view))
            if cells > self._memory.cells:
                raise ValueError(f"message of {len(view)} bytes, capacity {self._memory.capacity}")
            if not self._has_space(cells):
                return False
            self._publish(view, 0, len(view))
            self._count(len(view))
        return True

    def leave(self) -> None:
        self._presence.leave()
        self._memory.data_bell.ring()

    def _has_space(self, cells: int) -> bool:
        """Whether there is room now; if not, the space doorbell is armed."""
        if self._free() >= cells and not self._presence.peer_closed():
            return True
        if self._presence.peer_gone():
            raise RingClosed("the consumer is gone")
        self._bell.arm()
        self._memory.fence()
        if self._free() < cells:
            return False
        self._bell.disarm()
        return True

    def _free(self) -> int:
        return int(self._memory.cells - (self._position - self._words[W_HEAD]))

    def _wait_for_space(self, cells: int, deadline: float | None) -> None:
        if self._has_space(cells):
            return
        self._words[W_FULL_WAITS] += 1
        while (left := time_left(deadline)) > 0:
            self._bell.sleep(min(left, SLICE_SECONDS))
            if self._has_space(cells):
                self._bell.disarm()
                return
        self._bell.disarm()
        raise RingFull(f"no room for {cells} cells in time")

    def _send_in_pieces(self, view: memoryview, deadline: float | None) -> None:
        piece = max(1, self._memory.cells // 4) * self._memory.cell_bytes
        for start in range(0, len(view), piece):
            stop = min(start + piece, len(view))
            self._wait_for_space(self._memory.cells_for(stop - start), deadline)
            self._publish(view, start, stop)

    def _publish(self, view: memoryview, start: int, stop: int) -> None:
        """Copy view[start:stop] into runs and make them visible; there is room for all of it."""
        sent_at = time.monotonic_ns()
        while True:
            start += self._put_run(view, start, stop, sent_at)
            if start == stop:
                break
        self._words[W_TAIL] = self._position
        self._memory.fence()
        self._memory.data_bell.ring_if_idle()

    def _put_run(self, view: memoryview, start: int, stop: int, sent_at: int) -> int:
        """One run, up to the end of the ring at most; returns its bytes."""
        memory, words = self._memory, self._words
        slot = self._position % memory.cells
        offset = slot * memory.cell_bytes
        nbytes = min(stop - start, memory.capacity - offset)
        memory.payload[offset : offset + nbytes] = view[start : start + nbytes]
        flags = (FIRST if start == 0 else 0) | (LAST if start + nbytes == len(view) else 0)
        record = memory.record(slot)
        words[record + 1] = nbytes << 2 | flags
        words[record + 2] = len(view)
        words[record + 3] = sent_at
        memory.fence()
        words[record] = self._position + 1
        self._position += memory.cells_for(nbytes)
        return int(nbytes)

    def _count(self, nbytes: int) -> None:
        self._words[W_SENT] += 1
        self._words[W_SENT_BYTES] += nbytes


class Consumer:
    """The reading end. Holds the runs of a message whose last run has not come yet."""

    def __init__(self, memory: RingMemory) -> None:
        self._memory = memory
        self._words = memory.words
        self._bell = memory.data_bell
        self._presence = Presence(memory, "consumer")
        self._position = 0
        self._parts: list[bytes] = []

    def receive(self, timeout: float | None, spin_seconds: float) -> bytes | None:
        message = self._take()
        if message is None and spin_seconds > 0:
            message = self._spin(spin_seconds if timeout is None else min(timeout, spin_seconds))
        if message is None:
            return self._await(timeout)
        if self._words[W_CONSUMER_IDLE]:
            self._words[W_CONSUMER_IDLE] = 0
        return message

    def leave(self) -> None:
        self._presence.leave()
        self._memory.space_bell.ring()

    def _spin(self, seconds: float) -> bytes | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (message := self._take()) is not None:
                return message
            os.sched_yield()
        return None

    def _await(self, timeout: float | None) -> bytes | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._bell.arm()
            self._memory.fence()
            if (message := self._take()) is not None:
                self._bell.disarm()
                self._bell.ring()  # more may wait, and the drained doorbell would not say so
                return message
            left = time_left(deadline)
            if self._presence.peer_gone(polling=timeout == 0):
                return self._last_message()
            if left <= 0:
                return None
            self._bell.sleep(min(left, SLICE_SECONDS))
            if (message := self._take()) is not None:
                self._bell.disarm()
                return message

    def _last_message(self) -> bytes:
        """What a producer that is gone left in the ring."""
        if (message := self._take()) is None:
            raise RingClosed("the producer is gone")
        return message

    def _take(self) -> bytes | None:
        """Consume visible runs up to the end of a message; None when it is not complete."""
        words, memory = self._words, self._memory
        while True:
            slot = self._position % memory.cells
            record = memory.record(slot)
            if words[record] != self._position + 1:
                return None
            memory.fence()
            packed, total, sent_at = words[record + 1], words[record + 2], words[record + 3]
            payload = self._copy_run(slot, packed >> 2)
            if packed & FIRST:
                self._parts.clear()  # of a message whose sender gave up
            self._parts.append(payload)
            if packed & LAST:
                message = payload if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                if len(message) != total:
                    raise RingClosed("the producer wrote a message of the wrong size")
                self._count(total, sent_at)
                return message

    def _copy_run(self, slot: int, nbytes: int) -> bytes:
        """Copy a run out and give its cells back."""
        memory = self._memory
        start = slot * memory.cell_bytes
        if start + nbytes > memory.capacity:
            raise RingClosed("the producer wrote a record that is not valid")
        payload = bytes(memory.payload[start : start + nbytes])
        cells = memory.cells_for(nbytes)
        if memory.poison:
            size = cells * memory.cell_bytes
            memory.payload[start : start + size] = bytes([POISON]) * size
        self._position += cells
        memory.fence()
        self._words[W_HEAD] = self._position
        memory.fence()
        memory.space_bell.ring_if_idle()
        return payload

    def _count(self, nbytes: int, sent_at: int) -> None:
        words, hop = self._words, time.monotonic_ns() - sent_at
        words[W_RECEIVED] += 1
        words[W_RECEIVED_BYTES] += nbytes
        words[W_HOP_NS] += hop
        if hop > words[W_HOP_MAX_NS]:
            words[W_HOP_MAX_NS] = hop


def time_left(deadline: float | None) -> float:
    """Seconds to `deadline`; without one, a slice."""
    return SLICE_SECONDS if deadline is None else deadline - time.monotonic()
