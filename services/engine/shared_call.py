"""Many requests over one GenerateMany call: one message takes what all of them have to say."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Any

import grpc.aio
from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.common_pb2 import ErrorReason

from services.common.errors import ServiceError
from services.engine.front import Front
from services.engine.outbox import TokenOutbox

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

MAX_MESSAGE_BYTES = 4 << 20  # of events in one message; a quarter of the limit
logger = logging.getLogger(__name__)
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


class SharedCall:
    """The requests of one call. Event loop only; `close` must be called at its end."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._outboxes: dict[int, TokenOutbox] = {}
        self._refused: dict[int, ServiceError] = {}
        self._dirty: dict[int, None] = {}  # an ordered set
        self._spent: list[TokenOutbox] = []  # their last events are on the way
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._compiling: dict[int, asyncio.Task[None]] = {}
        self._news = asyncio.Event()

    def take(self, message: pb.GenerateManyRequest) -> None:
        """What the client says. Raises ServiceError, which ends the call, for a used number."""
        for item in message.items:
            if item.HasField("open"):
                self._begin(item)
            elif item.drop and (task := self._compiling.pop(item.request, None)):
                task.cancel()
            elif outbox := self._outboxes.get(item.request):
                if item.drop:
                    self._forget(item.request)
                    self._front.close(outbox)
                else:
                    outbox.taken(item.taken)

    def _begin(self, item: pb.GenerateManyItem) -> None:
        """Open the request, once its grammar is compiled: others go on meanwhile."""
        number = item.request
        if number in self._outboxes or number in self._compiling:
            reason = ErrorReason.ERROR_REASON_INVALID_FIELD
            raise ServiceError(reason, f"request {number} is open already", field="request")
        if item.open.HasField("grammar"):
            self._compiling[number] = asyncio.create_task(self._complete(item))
        else:
            self._open(item)

    async def _complete(self, item: pb.GenerateManyItem) -> None:
        try:
            await self._front.complete(item.open)
        except Exception as error:
            if not isinstance(error, ServiceError):
                logger.error("a grammar could not be compiled", exc_info=error)
                error = _internal()
            self._refused[item.request] = error
            self._mark(item.request)
        else:
            self._open(item)
        del self._compiling[item.request]

    def _open(self, item: pb.GenerateManyItem) -> None:
        number = item.request
        seconds = item.timeout_seconds if item.HasField("timeout_seconds") else None
        try:
            outbox = self._front.open(item.open, seconds, windowed=True)
        except ServiceError as error:
            self._refused[number] = error
        else:
            self._outboxes[number] = outbox
            outbox.on_news = functools.partial(self._mark, number)
            if seconds is not None:
                loop = asyncio.get_running_loop()
                self._timers[number] = loop.call_later(seconds, outbox.fail, _deadline())
        self._mark(number)

    def _mark(self, number: int) -> None:
        if number in self._outboxes or number in self._refused:
            self._dirty[number] = None
            self._news.set()

    def _forget(self, number: int) -> TokenOutbox | None:
        if timer := self._timers.pop(number, None):
            timer.cancel()
        self._dirty.pop(number, None)
        return self._outboxes.pop(number, None)

    async def write(self, context: Context) -> None:
        """Send what there is, for ever. What comes in meanwhile goes with the next message."""
        while True:
            await self._news.wait()
            self._news.clear()
            message = self._collect()
            if message.answers:
                await context.write(message)
            self._close_spent()

    def _collect(self) -> pb.GenerateManyResponse:
        message = pb.GenerateManyResponse()
        size = 0
        while self._dirty and size < MAX_MESSAGE_BYTES:
            number = next(iter(self._dirty))
            del self._dirty[number]
            answer = self._answer(number)
            if answer is not None:
                size += answer.ByteSize()
                message.answers.append(answer)
        if self._dirty:
            self._news.set()
        return message

    def _answer(self, number: int) -> pb.GenerateManyAnswer | None:
        """Everything that a request may send now; None when that is nothing."""
        outbox = self._outboxes.get(number)
        if outbox is None:
            return _failed(number, self._refused.pop(number))
        try:
            first = outbox.poll()
            answer = pb.GenerateManyAnswer(request=number)
            event = first
            while event is not None:
                answer.events.append(event)
                event = outbox.poll()
        except ServiceError as error:
            answer = _failed(number, error)
        else:
            if not outbox.ended:
                return None if first is None else answer
        self._forget(number)
        self._spent.append(outbox)
        return answer

    def _close_spent(self) -> None:
        for outbox in self._spent:
            self._front.close(outbox)
        self._spent.clear()

    def close(self) -> None:
        """Abort what is still running."""
        for task in self._compiling.values():
            task.cancel()
        self._close_spent()
        for number in tuple(self._outboxes):
            if outbox := self._forget(number):
                self._front.close(outbox)


async def serve_shared(front: Front, context: Context) -> None:
    """Serve one GenerateMany call to its end."""
    call = SharedCall(front)
    writer = asyncio.create_task(call.write(context))
    reader = asyncio.create_task(_read(call, context))
    try:
        await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (reader, writer):
            task.cancel()
        try:  # the end of the call may be seen by the reader first and cancel us here
            outcomes = await asyncio.gather(reader, writer, return_exceptions=True)
        finally:
            call.close()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


async def _read(call: SharedCall, context: Context) -> None:
    while (message := await context.read()) is not _EOF:
        call.take(message)


def _failed(number: int, error: ServiceError) -> pb.GenerateManyAnswer:
    return pb.GenerateManyAnswer(
        request=number,
        error=error.reason,
        error_message=error.message,
        error_field=error.field,
        retry_after_seconds=error.retry_after,
    )


def _internal() -> ServiceError:
    return ServiceError(ErrorReason.ERROR_REASON_INTERNAL, "the grammar could not be compiled")


def _deadline() -> ServiceError:
    return ServiceError(ErrorReason.ERROR_REASON_DEADLINE, "the deadline passed")
