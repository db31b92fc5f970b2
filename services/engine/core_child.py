"""One life of the engine core's process, and the two rings to it."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from warhorse.v1.stage_pb2 import CoreCommand, CoreEvent

from services.common.ring import Ring, RingClosed, RingFull, RingStats

MAX_EVENTS_PER_TURN = 64  # then other work of the loop has its turn
SEND_SECONDS = 0.2

logger = logging.getLogger(__name__)


class CoreChild:
    """A running core process. Event loop only, apart from its sending thread.

    The process is a fresh interpreter: nothing of the front (its gRPC threads least of all) is
    forked into it. It gets the rings as inherited descriptors and ends with this process.
    """

    def __init__(self, command: Sequence[str], on_event: Callable[[CoreEvent], None]) -> None:
        """`command` are the interpreter's arguments; those of the rings are put behind them."""
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._commands = Ring.create()
        self._events = Ring.create()
        self._process = self._spawn(command)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._sender = _CommandSender(self._commands)
        self._closed = False
        self._events_fd = self._events.fileno()
        self._loop.add_reader(self._events_fd, self._read)
        self._loop.add_reader(self._pidfd, self._reap)

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        commands, events = self._commands.fds(), self._events.fds()
        own = (
            "--command-fds", ",".join(map(str, commands)),
            "--event-fds", ",".join(map(str, events)),
            "--front-pid", str(os.getpid()),
        )  # fmt: skip
        line = [sys.executable, *command, *own]
        environment = {
            # Threads that spin at barriers halt each other where cores are shared.
            "OMP_WAIT_POLICY": "PASSIVE",
            "GRPC_VERBOSITY": "ERROR",  # its lines are not JSON and hold socket paths
            **os.environ,
            # It finds modules where this process finds them, however that was arranged.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        return subprocess.Popen(
            line, stdin=subprocess.DEVNULL, pass_fds=(*commands, *events), env=environment
        )

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._process.pid

    def ring_stats(self) -> dict[str, RingStats]:
        """Counters of both rings; none once they are closed."""
        if self._closed:
            return {}
        return {"commands": self._commands.stats(), "events": self._events.stats()}

    def send(self, command: CoreCommand) -> None:
        """Pass a command on; never blocks, and is lost when the process has ended."""
        self._sender.put(command.SerializeToString())

    async def exited(self) -> int:
        """Wait for the end of the process; its exit code, negative for a signal."""
        return await asyncio.shield(self._exit)

    def kill(self) -> None:
        """End the process at once; `exited` then resolves."""
        if not self._exit.done():
            self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Free rings, thread and descriptors; the process must have ended."""
        self._read_rest()
        self._closed = True
        self._loop.remove_reader(self._events_fd)
        self._sender.close()
        self._commands.close()
        self._events.close()
        os.close(self._pidfd)

    def _read(self) -> None:
        """Take what waits. The doorbell is armed only once nothing is left."""
        if self._closed:
            return
        for _ in range(MAX_EVENTS_PER_TURN):
            if not self._read_one():
                return
        self._loop.call_soon(self._read)

    def _read_one(self) -> bool:
        try:
            data = self._events.receive(timeout=0)
        except RingClosed:
            self._loop.remove_reader(self._events_fd)
            return False
        if data is not None:
            self._on_event(CoreEvent.FromString(data))
        return data is not None

    def _read_rest(self) -> None:
        while self._read_one():
            pass

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._exit.set_result(self._process.wait())


class _CommandSender:
    """Sends on a ring from a thread of its own, since a full ring makes the sender wait."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="core-commands", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        self._queue.put(data)

    def close(self) -> None:
        """Stop the thread; commands that wait are dropped."""
        self._closed.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            if not self._send(data):
                return

    def _send(self, data: bytes) -> bool:
        while not self._closed.is_set():
            try:
                self._ring.send(data, timeout=SEND_SECONDS)
            except RingFull:
                continue
            except RingClosed:
                return False
            return True
        return False
