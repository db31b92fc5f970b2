"""Runs worker processes that can be ended for certain and gives them work, one request at a time.

What a worker does is the module that it runs; `worker_process` is the worker's side. Both sides
send frames: length (4 bytes, little-endian), then bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from services.common.worker_process import LENGTH

# Beyond the worker's own alarm: a worker that is stopped (SIGSTOP) or starved is ended too.
_GRACE_SECONDS = 5.0
_DIED = (asyncio.IncompleteReadError, ConnectionError)


class WorkerEndedError(Exception):
    """The worker took too long or too much memory and was ended."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one request may take: time, and the address space of its process."""

    seconds: float
    memory_bytes: int


class _Worker:
    """One worker process, started when it is first needed. One request at a time."""

    def __init__(self, module: str, limits: WorkerLimits, flags: tuple[str, ...]) -> None:
        self._module = module
        self._limits = limits
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, request: bytes) -> bytes:
        """The worker's reply. A worker that died gets one successor: it may have been dead before
        the request came. Raises WorkerEndedError."""
        for _ in range(2):
            try:
                return await self._attempt(request)
            except _DIED:
                await self.close()
            except TimeoutError:
                await self.close()
                break
        raise WorkerEndedError

    async def _attempt(self, request: bytes) -> bytes:
        process = await self.start()
        async with asyncio.timeout(self._limits.seconds + _GRACE_SECONDS):
            return await _exchange(process, request)

    async def start(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            limits = self._limits
            flags = ("--seconds", str(limits.seconds), "--memory-bytes", str(limits.memory_bytes))
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module, *flags, *self._flags,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=_environment(),
            )  # fmt: skip
        return self._process

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # It may have ended by itself a moment ago, which the event loop has not noticed yet.
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.shield(process.wait())
        if process.stdin is not None:
            process.stdin.close()


def _environment() -> dict[str, str]:
    """Return the environment in which the worker finds this package."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, str(Path(root) / "protos"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


async def _exchange(process: asyncio.subprocess.Process, request: bytes) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    if process.stdin.is_closing():  # the other end is gone, the exit status not yet known
        raise ConnectionResetError("the worker has closed its input")
    process.stdin.write(LENGTH.pack(len(request)))
    process.stdin.write(request)
    await process.stdin.drain()
    length = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))[0]
    return await process.stdout.readexactly(length)


class WorkerPool:
    """Workers of one kind. Requests wait for a free one by rank, then in order of arrival."""

    def __init__(
        self, module: str, limits: WorkerLimits, workers: int, flags: tuple[str, ...] = ()
    ) -> None:
        """module: what a worker runs. flags: further ones of its command line."""
        self._all = [_Worker(module, limits, flags) for _ in range(workers)]
        self._free = list(self._all)
        self._waiting: list[tuple[int, int, asyncio.Future[_Worker]]] = []  # a heap
        self._order = itertools.count()
        self._tasks: set[asyncio.Task[bytes]] = set()

    async def ask(self, request: bytes, rank: int = 0) -> bytes:
        """Return a worker's reply; the lowest rank goes first. Raises WorkerEndedError."""
        task = asyncio.create_task(self._ask(await self._take(rank), request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A caller that goes away does not stop the worker, which is free soon enough by itself.
        return await asyncio.shield(task)

    async def _take(self, rank: int) -> _Worker:
        if self._free:
            return self._free.pop()
        turn: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._order), turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(turn.result())
            raise

    def _give_back(self, worker: _Worker) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(worker)
                return
        self._free.append(worker)

    async def _ask(self, worker: _Worker, request: bytes) -> bytes:
        try:
            return await worker.ask(request)
        finally:
            self._give_back(worker)

    async def start(self) -> None:
        """Start all workers now instead of with their first request."""
        for worker in self._all:
            await worker.start()

    async def close(self) -> None:
        """End all workers."""
        for worker in self._all:
            await worker.close()
