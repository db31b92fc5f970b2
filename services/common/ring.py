"""A message queue between two processes: one producer, one consumer, no system call when busy.

A message takes as many neighbouring cells as it needs (a run); it is split where the ring wraps
and, if it is larger than the ring, into several runs. The record of a run's first cell holds the
sequence number `position + 1`, written last: the consumer has a run exactly when it reads the
number it expects.

A side that is about to sleep raises its idle flag, looks once more and polls its eventfd; the
other side writes that eventfd only when it sees the flag. Sleeps are cut into slices, so neither
a lost doorbell nor the death of the other process can block longer than the caller's time-out.
"""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from types import TracebackType

from services.common.ring_ends import Buffer, Consumer, Producer, RingClosed, RingFull
from services.common.ring_memory import (
    RingError,
    RingMemory,
    RingStats,
    Role,
    close_all,
    make_ring_fds,
)

__all__ = ["Ring", "RingClosed", "RingError", "RingFull", "RingStats"]


class Ring:
    """One end of a ring. One thread at a time per end.

    The object that `create` returns may hand out `fds()` and also serve as one end: it takes the
    producer's role at its first send, the consumer's at its first receive.
    """

    def __init__(self, memory: RingMemory, role: Role | None = None) -> None:
        """Takes over `memory`. Use create or attach."""
        self._memory = memory
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._closed = False
        if role == "producer":
            self._writer()
        elif role == "consumer":
            self._reader()

    @classmethod
    def create(cls, cells: int = 1024, cell_bytes: int = 4096, *, poison: bool = False) -> Ring:
        """A new ring with room for `cells * cell_bytes` bytes of messages.

        `cell_bytes` is a multiple of 64. With `poison` unwritten and consumed payload is 0xA5, so
        that a read of stale memory shows in tests.
        """
        fds = make_ring_fds(cells, cell_bytes, poison=poison)
        return cls(RingMemory(fds, poison=poison))

    @classmethod
    def attach(cls, fds: Sequence[int], *, role: Role, poison: bool = False) -> Ring:
        """Become one end of the ring behind `fds()` of another object or process.

        The descriptors are duplicated; the caller still owns its own. Raises RingError when the
        end is taken or was used before, ValueError when the file is not a ring.
        """
        if len(fds) != 3:
            raise ValueError(f"a ring has 3 descriptors, not {len(fds)}")
        own = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in fds]
        try:
            memory = RingMemory(own, poison=poison)
        except BaseException:
            close_all(own)
            raise
        try:
            return cls(memory, role)
        except BaseException:
            memory.close()
            raise

    def fds(self) -> tuple[int, ...]:
        """Descriptors to hand to the other end (SCM_RIGHTS, pass_fds). Still owned by this one."""
        return self._memory.fds

    @property
    def capacity(self) -> int:
        """Bytes of the largest message that can lie in the ring as a whole."""
        return self._memory.capacity

    def send(self, data: Buffer, timeout: float | None = None) -> None:
        """Deliver one message; waits up to `timeout` seconds (None: for ever) for room.

        Raises RingFull when there was no room in time, RingClosed when the consumer is gone. A
        message larger than the ring travels in pieces while the consumer reads; if that stalls,
        the consumer drops the pieces it has.
        """
        self._writer().send(data, timeout)

    def try_send(self, data: Buffer) -> bool:
        """Deliver one message if there is room for all of it now. For messages up to `capacity`.

        Raises RingClosed when the consumer is gone, ValueError above the capacity. After False the
        space doorbell is armed.
        """
        return self._writer().try_send(data)

    def space_fileno(self) -> int:
        """Readable when room was made after a `try_send` that returned False."""
        return self._memory.fds[2]

    def receive(self, timeout: float | None = None, spin_seconds: float = 0.0) -> bytes | None:
        """The next message, or None after `timeout` seconds (0: do not wait, None: for ever).

        Polls for `spin_seconds` before it sleeps. Raises RingClosed when the producer is gone and
        everything it sent was read. After None the doorbell is armed: with an event loop, read
        until None whenever `fileno()` is readable.
        """
        return self._reader().receive(timeout, spin_seconds)

    def fileno(self) -> int:
        """Readable when a message waits; for `add_reader`. See `receive`.

        The death of the producer does not make it readable: call `receive(0)` on a timer, too.
        """
        self._reader()
        return self._memory.fds[1]

    def stats(self) -> RingStats:
        """Counters of both ends, readable from either."""
        return self._memory.stats()

    def close(self) -> None:
        """Say goodbye to the other end and free everything of this one. Idempotent."""
        if self._closed:
            return
        self._closed = True
        end = self._producer or self._consumer
        self._producer = self._consumer = None
        if end is not None:
            end.leave()
        self._memory.close()

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _writer(self) -> Producer:
        if self._producer is None:
            self._require_free_end("consumer")
            self._producer = Producer(self._memory)
        return self._producer

    def _reader(self) -> Consumer:
        if self._consumer is None:
            self._require_free_end("producer")
            self._consumer = Consumer(self._memory)
        return self._consumer

    def _require_free_end(self, other: Role) -> None:
        if self._closed:
            raise RingClosed("this end is closed")
        if self._producer is not None or self._consumer is not None:
            raise RingError(f"this end of the ring is the {other}: attach another one")
