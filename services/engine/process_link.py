"""The engine core as a process of its own: starting it, starting it again, asking it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.stage_pb2 import (
    CoreAbort,
    CoreCommand,
    CoreDescribe,
    CoreDescription,
    CoreEvent,
    CoreProfile,
    CoreProfileDone,
    CoreReset,
    CoreResetDone,
    CoreStop,
    CoreSubmit,
)

from services.common.errors import ServiceError
from services.common.lifecycle import EXIT_CANNOT_START, EXIT_FAILED
from services.common.ring import RingStats
from services.engine.core_child import CoreChild
from services.engine.link import CoreListener

CORE_MODULE = "services.engine.core_process"
FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 30.0
STEADY_SECONDS = 60.0  # a core that was ready this long was sound: delays start anew
MAX_FAILED_STARTS = 5  # in a row, none of them ready
STOP_SECONDS = 3.0

Reply = TypeVar("Reply", CoreDescription, CoreResetDone, CoreProfileDone)
_AnyReply: TypeAlias = CoreDescription | CoreResetDone | CoreProfileDone

logger = logging.getLogger(__name__)


class ProcessLink:
    """A CoreLink whose core runs in a child process. Event loop only.

    A core that ends is started again after a delay that doubles. The listener hears `on_refused`
    when a core says that it cannot start at all (a fault of checkpoint or settings) or when
    `MAX_FAILED_STARTS` cores in a row end before they are ready.
    """

    def __init__(self, core_argv: Sequence[str], module: str = CORE_MODULE) -> None:
        """`core_argv` are the engine's own flags, passed on to the core process `module`."""
        self._command = ("-m", module, *core_argv)
        self._child: CoreChild | None = None
        self._ready_at: float | None = None
        self._tickets = itertools.count(1)
        self._replies: dict[int, asyncio.Future[_AnyReply]] = {}
        self._stopping = False
        self._keeper: asyncio.Task[None] | None = None

    def ring_stats(self) -> dict[str, RingStats]:
        """Counters of the rings to the present core, by what they carry. Event loop only."""
        return {} if self._child is None else self._child.ring_stats()

    @property
    def core_pid(self) -> int | None:
        """Process id of the present core."""
        return None if self._child is None else self._child.pid

    def start(self, listener: CoreListener) -> None:
        """Bring the core up in the background and keep one up."""
        self._keeper = asyncio.get_running_loop().create_task(self._keep(listener))

    async def _keep(self, listener: CoreListener) -> None:
        try:
            await self._keep_up(listener)
        except Exception:
            logger.critical("cannot keep an engine core up", exc_info=True)
            listener.on_refused(EXIT_FAILED)

    async def _keep_up(self, listener: CoreListener) -> None:
        failed, delay = 0, FIRST_DELAY_SECONDS
        while True:
            exit_code = await self._live(listener)
            if self._stopping:
                return
            lived = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
            failed = failed + 1 if self._ready_at is None else 0
            if exit_code == EXIT_CANNOT_START or failed >= MAX_FAILED_STARTS:
                listener.on_refused(EXIT_FAILED if failed >= MAX_FAILED_STARTS else exit_code)
                return
            delay = FIRST_DELAY_SECONDS if lived > STEADY_SECONDS else delay
            logger.error("engine core ended (%d), next start in %.2f s", exit_code, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)

    async def _live(self, listener: CoreListener) -> int:
        """One life of a core; returns its exit code."""
        self._ready_at = None
        child = CoreChild(self._command, lambda event: self._dispatch(event, listener))
        self._child = child
        try:
            exit_code = await child.exited()
        except asyncio.CancelledError:
            child.kill()
            await child.exited()
            raise
        finally:
            self._child = None
            child.close()
            self._lose(listener)
        return exit_code

    def _lose(self, listener: CoreListener) -> None:
        error = ServiceError(
            ErrorReason.ERROR_REASON_ENGINE_LOST, "the engine core ended unexpectedly"
        )
        listener.on_lost(error.message)
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            if not reply.done():
                reply.set_exception(error)

    def _dispatch(self, event: CoreEvent, listener: CoreListener) -> None:
        match event.WhichOneof("event"):
            case "step":
                listener.on_step(event.step)
            case "ready":
                self._ready_at = time.monotonic()
                listener.on_ready(event.ready)
            case "description":
                self._answer(event.description)
            case "reset_done":
                self._answer(event.reset_done)
            case "profile_done":
                self._answer(event.profile_done)
            case other:
                raise ValueError(f"unknown event of the engine core: {other}")

    def _answer(self, message: _AnyReply) -> None:
        reply = self._replies.pop(message.ticket, None)
        if reply is not None and not reply.done():
            reply.set_result(message)

    def submit(self, submit: CoreSubmit) -> None:
        """Hand over a validated request."""
        self._send(CoreCommand(submit=submit))

    def abort(self, handle: int) -> None:
        """Forget a request; nothing to do when its core is gone."""
        if self._child is not None:
            self._child.send(CoreCommand(abort=CoreAbort(handle=handle)))

    async def reset(self) -> CoreResetDone:
        """Drop the unreferenced entries of the prefix cache."""
        ticket = next(self._tickets)
        return await self._ask(ticket, CoreCommand(reset=CoreReset(ticket=ticket)), CoreResetDone)

    async def profile(self, *, start: bool) -> CoreProfileDone:
        """Start a trace between two steps, or stop and write it."""
        ticket = next(self._tickets)
        command = CoreCommand(profile=CoreProfile(ticket=ticket, start=start))
        return await self._ask(ticket, command, CoreProfileDone)

    async def describe(self) -> CoreDescription:
        """Present counters of the core, taken between two of its steps."""
        ticket = next(self._tickets)
        command = CoreCommand(describe=CoreDescribe(ticket=ticket))
        return await self._ask(ticket, command, CoreDescription)

    async def _ask(self, ticket: int, command: CoreCommand, kind: type[Reply]) -> Reply:
        reply: asyncio.Future[_AnyReply] = asyncio.get_running_loop().create_future()
        self._replies[ticket] = reply
        try:
            self._send(command)
            message = await reply
        finally:
            self._replies.pop(ticket, None)
        if not isinstance(message, kind):
            raise TypeError(f"the core answered {type(message).__name__}")
        return message

    def _send(self, command: CoreCommand) -> None:
        if self._child is None or self._ready_at is None:
            reason = ErrorReason.ERROR_REASON_LOADING
            raise ServiceError(reason, "the model is being loaded", retry_after=1.0)
        self._child.send(command)

    async def stop(self) -> None:
        """Ask a ready core to end, then end it; frees rings and descriptors."""
        if self._keeper is None:
            return
        self._stopping = True
        if self._child is not None and self._ready_at is not None:
            self._child.send(CoreCommand(stop=CoreStop()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._child.exited(), STOP_SECONDS)
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
