"""The ASGI side of a generation: disconnects, keep-alive, stalled clients, errors in streams."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.errors import ApiError, to_api_error
from services.gateway.events import Event
from services.gateway.generation import EventStream
from services.gateway.messages.errors import error_response
from services.gateway.meter import RequestMeter
from services.gateway.origins import FieldNames
from services.gateway.plan import GenerationPlan
from services.gateway.queue import Place
from services.gateway.state import GatewayState

logger = logging.getLogger(__name__)

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
CLIENT_CLOSED = 499


class Writer(Protocol):
    """Turns events into the bytes of one response format.

    `keep_alive` is what an idle stream sends.
    """

    keep_alive: bytes

    async def feed(self, events: Sequence[Event]) -> bytes:
        """Bytes to send now; empty while a whole body is collected."""
        ...

    async def finish(self) -> bytes:
        """The last bytes of a stream, or the whole body."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """The last bytes of a stream that broke."""
        ...


class Job(Protocol):
    """One generation request of any endpoint."""

    streaming: bool
    meter: RequestMeter
    names: FieldNames | None  # where the request was made from one of another interface

    async def prepare(self) -> Sequence[GenerationPlan]:
        """Render or encode the prompts and resolve every parameter; raises ApiError."""
        ...

    def writer(self, stream: EventStream) -> Writer:
        """The writer for this request's format."""
        ...


class GenerationResponse(Response):
    """Runs a job while it watches for the client's disconnect; owns the generation's life."""

    def __init__(self, job: Job, state: GatewayState) -> None:
        self._job = job
        self._state = state
        self._patience = state.patience
        self._started = False
        self._last_sent = time.monotonic()
        self._sending_since: float | None = None
        self._stalled = False
        self._stream: EventStream | None = None
        self._writer: Writer | None = None
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; returns when the response is complete or the client is gone."""
        work = asyncio.create_task(self._serve(scope, receive, send))
        gone = asyncio.create_task(_disconnect(receive))
        ticker = asyncio.create_task(self._tick(work))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                scope["status"] = CLIENT_CLOSED
        finally:
            for task in (work, gone, ticker):
                task.cancel()
            await asyncio.gather(work, gone, ticker, return_exceptions=True)
            self._job.meter.close()
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error
        if self._stalled:
            logger.warning("a client took nothing for %.0f s and was cut", self._patience.stall)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._generate(send)
        except Exception as error:
            found = to_api_error(error)
            names = self._job.names
            await self._fail(names.rename(found) if names else found, scope, receive, send)

    async def _generate(self, send: Send) -> None:
        job = self._job
        with self._state.queue.place() as place:
            plans = await job.prepare()
            with self._state.live.running(plans):
                await self._run(send, plans, place)

    async def _run(self, send: Send, plans: Sequence[GenerationPlan], place: Place) -> None:
        job, state = self._job, self._state
        async with EventStream(plans, state.engines, state.tokenizers) as stream:
            self._stream = stream
            writer = self._writer = job.writer(stream)
            while (events := await stream.take()) is not None:
                if events:
                    place.leave()
                    job.meter.on_events(events)
                    data = await writer.feed(events)
                else:
                    data = writer.keep_alive if self._is_idle() else b""
                if data:
                    await self._send(send, data, more=True)
            job.meter.on_complete(stream.usage(), stream.times())
            await self._send(send, await writer.finish(), more=False)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self._job.meter.on_error(error.status)
        if self._started and self._writer is not None:
            await self._send(send, self._writer.fail(error), more=False)
        else:
            self._started = True
            await error_response(error, scope["path"])(scope, receive, send)

    async def _send(self, send: Send, data: bytes, *, more: bool) -> None:
        self._sending_since = time.monotonic()
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self._head(data)})
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._last_sent = time.monotonic()
        self._sending_since = None

    def _head(self, data: bytes) -> list[tuple[bytes, bytes]]:
        if self._job.streaming:
            return SSE_HEADERS
        length = str(len(data)).encode()
        return [(b"content-type", b"application/json"), (b"content-length", length)]

    def _is_idle(self) -> bool:
        interval = self._patience.keep_alive
        idle = time.monotonic() - self._last_sent
        return self._job.streaming and interval > 0 and idle >= interval

    async def _tick(self, work: asyncio.Task[None]) -> None:
        """Wake the writer when it is idle, and end it when the client takes nothing."""
        while True:
            await asyncio.sleep(self._patience.tick)
            since = self._sending_since
            if since is not None and time.monotonic() - since >= self._patience.stall:
                self._stalled = True
                work.cancel()
                return
            if self._is_idle() and self._stream is not None:
                self._stream.poke()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
