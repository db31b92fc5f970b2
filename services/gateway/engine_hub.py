"""All requests that one engine runs for this gateway, over one GenerateMany call."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import Any, Protocol

import grpc
from warhorse.v1 import common_pb2, engine_pb2, engine_pb2_grpc

from services.common.errors import ServiceError
from services.common.grpc_client import MAX_MESSAGE_BYTES
from services.gateway.calls import read

logger = logging.getLogger(__name__)

TAKEN_STEP = 256  # tokens between two acknowledgements; a quarter of the engine's window
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES // 2
_MESSAGE_BYTES = MAX_REQUEST_BYTES + 1024  # holds the largest request with its envelope


class EngineReader(Protocol):
    """Who hears of a request. Called on the event loop; must not block."""

    def on_event(self, event: engine_pb2.GenerateResponse) -> None:
        """The next event; raises ServiceError when the request cannot go on."""
        ...

    def on_failure(self, error: ServiceError) -> None:
        """No more events will come."""
        ...


class EngineRequest:
    """One request on its way; `drop` when nobody needs it any more."""

    def __init__(self, hub: EngineHub, number: int, reader: EngineReader) -> None:
        self.reader = reader
        self._hub = hub
        self._number = number
        self._taken = 0

    def taken(self, tokens: int) -> None:
        """So many tokens were used up: the engine may send as many more."""
        self._taken += tokens
        if self._taken >= TAKEN_STEP:
            self._hub.say(engine_pb2.GenerateManyItem(request=self._number, taken=self._taken))
            self._taken = 0

    def drop(self) -> None:
        """Cancel the request, unless it has ended; its reader hears nothing more."""
        self._hub.drop(self._number)


class EngineHub:
    """Opens requests and hands out what they bring. When the call breaks, all of them fail.

    One event loop; the call exists from the first request until it breaks or `close`.
    """

    def __init__(self, stub: engine_pb2_grpc.EngineServiceStub) -> None:
        self._stub = stub
        self._numbers = itertools.count(1)
        self._requests: dict[int, EngineRequest] = {}
        self._unsent: deque[engine_pb2.GenerateManyItem] = deque()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def open(
        self, request: engine_pb2.GenerateRequest, seconds: float | None, reader: EngineReader
    ) -> EngineRequest:
        """Start a request that may take `seconds`; its events go to `reader`.

        Raises ServiceError for one that no message could hold.
        """
        if request.ByteSize() > MAX_REQUEST_BYTES:
            reason = common_pb2.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED
            raise ServiceError(reason, "The request is too large for any engine.")
        number = next(self._numbers)
        opened = self._requests[number] = EngineRequest(self, number, reader)
        self.say(engine_pb2.GenerateManyItem(request=number, open=request, timeout_seconds=seconds))
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="engine-hub")
        return opened

    def drop(self, number: int) -> None:
        """Forget a request."""
        if self._requests.pop(number, None) is not None:
            self.say(engine_pb2.GenerateManyItem(request=number, drop=True))

    def say(self, item: engine_pb2.GenerateManyItem) -> None:
        """Send `item` with the next message."""
        self._unsent.append(item)
        self._news.set()

    async def close(self) -> None:
        """End the call."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        call = self._stub.GenerateMany()
        writer = asyncio.create_task(self._write(call))
        error = ServiceError(common_pb2.ERROR_REASON_ENGINE_LOST, "The engine ended the call.")
        try:
            while (response := await read(call)) is not None:
                for answer in response.answers:
                    self._settle(answer)
        except ServiceError as broken:
            error = broken
        except Exception:
            # A fault of ours: the requests must not wait for events that nobody reads.
            logger.exception("the engine hub failed")
        finally:
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            self._lose_all(error)

    async def _write(self, call: Any) -> None:
        """Send what there is to say; the reader hears of a call that broke."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                while self._unsent:
                    await call.write(self._next_message())
            except (grpc.RpcError, asyncio.InvalidStateError):
                return

    def _next_message(self) -> engine_pb2.GenerateManyRequest:
        message = engine_pb2.GenerateManyRequest()
        while self._unsent and message.ByteSize() + self._unsent[0].ByteSize() <= _MESSAGE_BYTES:
            message.items.append(self._unsent.popleft())
        return message

    def _settle(self, answer: engine_pb2.GenerateManyAnswer) -> None:
        request = self._requests.get(answer.request)
        if request is None:
            return
        if answer.error:
            del self._requests[answer.request]
            request.reader.on_failure(_error(answer))
            return
        try:
            for event in answer.events:
                request.reader.on_event(event)
        except Exception as error:
            self.drop(answer.request)
            request.reader.on_failure(_as_service_error(error))

    def _lose_all(self, error: ServiceError) -> None:
        logger.log(logging.WARNING if self._requests else logging.DEBUG,
                   "an engine's call broke: %s", error)  # fmt: skip
        self._task = None
        self._unsent.clear()
        lost = list(self._requests.values())
        self._requests.clear()
        for request in lost:
            request.reader.on_failure(error)


def _as_service_error(error: Exception) -> ServiceError:
    """A fault of ours ends one request, not all that share the call."""
    if isinstance(error, ServiceError):
        return error
    logger.error("an event could not be handled", exc_info=error)
    return ServiceError(common_pb2.ERROR_REASON_INTERNAL, "Internal error.")


def _error(answer: engine_pb2.GenerateManyAnswer) -> ServiceError:
    retry = answer.retry_after_seconds if answer.HasField("retry_after_seconds") else None
    return ServiceError(
        answer.error, answer.error_message, field=answer.error_field, retry_after=retry
    )
