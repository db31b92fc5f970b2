"""Runs render workers and gives them work, one request each at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("<I")
_WORKER = "services.tokenizer.rendering.worker"
# Beyond the worker's own alarm: a worker that is stopped (SIGSTOP) or starved is ended too.
_GRACE_SECONDS = 5.0
_DIED = (asyncio.IncompleteReadError, ConnectionError)

logger = logging.getLogger(__name__)


class RenderError(Exception):
    """A template did not give a prompt; the text says why and names no file."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one rendering may take."""

    seconds: float = 5.0
    memory_bytes: int = 2 << 30
    max_chars: int = 16_000_000
    max_template_chars: int = 262_144


class _Worker:
    """One worker process, started when it is first needed. One request at a time."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's reply. A worker that died gets one successor: it may have been dead before
        the request came. Raises RenderError."""
        data = json.dumps(request).encode()
        for _ in range(2):
            try:
                return await self._attempt(data)
            except _DIED:
                await self.close()
            except TimeoutError:
                await self.close()
                break
        seconds = self._limits.seconds
        raise RenderError(f"it took more than {seconds:g} s or too much memory")

    async def _attempt(self, data: bytes) -> dict[str, Any]:
        process = await self._running()
        async with asyncio.timeout(self._limits.seconds + _GRACE_SECONDS):
            return await _exchange(process, data)

    async def start(self) -> None:
        await self._running()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            limits = self._limits
            arguments = {
                "--seconds": limits.seconds,
                "--memory-bytes": limits.memory_bytes,
                "--max-chars": limits.max_chars,
            }
            flags = [str(part) for item in arguments.items() for part in item]
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", _WORKER, *flags,
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
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


async def _exchange(process: asyncio.subprocess.Process, data: bytes) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    if process.stdin.is_closing():  # the other end is gone, the exit status not yet known
        raise ConnectionResetError("the worker has closed its input")
    process.stdin.write(_LENGTH.pack(len(data)) + data)
    await process.stdin.drain()
    length = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))[0]
    reply: dict[str, Any] = json.loads(await process.stdout.readexactly(length))
    return reply


class RenderPool:
    """Workers of one kind of template. Requests wait for a free worker in order of arrival."""

    def __init__(self, limits: RenderLimits, workers: int) -> None:
        self._limits = limits
        self._all = [_Worker(limits) for _ in range(workers)]
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        self._tasks: set[asyncio.Task[dict[str, Any]]] = set()
        for worker in self._all:
            self._free.put_nowait(worker)

    async def render(self, template: str, context: dict[str, Any]) -> str:
        """Return the text of a template. Raises RenderError."""
        if len(template) > self._limits.max_template_chars:
            limit = self._limits.max_template_chars
            raise RenderError(f"the template is longer than {limit} characters")
        worker = await self._free.get()
        task = asyncio.create_task(self._ask(worker, {"template": template, "context": context}))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A caller that goes away does not stop the worker, which is free soon enough by itself.
        reply = await asyncio.shield(task)
        if "text" not in reply:
            logger.info("template %s", reply["kind"])
            raise RenderError(reply["error"])
        text: str = reply["text"]
        return text

    async def _ask(self, worker: _Worker, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return await worker.ask(request)
        finally:
            self._free.put_nowait(worker)

    async def start(self) -> None:
        """Start all workers now instead of with their first request."""
        for worker in self._all:
            await worker.start()

    async def close(self) -> None:
        """End all workers."""
        for worker in self._all:
            await worker.close()
