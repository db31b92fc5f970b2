"""Client side of ParseMany: many choices over one call, a message for all that happens at once.

For gateways. Free of the tokenizer's own dependencies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol

import grpc
import grpc.aio
from warhorse.v1 import common_pb2, tokenizer_pb2

from services.common.errors import ServiceError, from_rpc_error

logger = logging.getLogger(__name__)

_MAX_ITEMS = 512
_MAX_BYTES = 4 << 20


class ManyCall(Protocol):
    """What is used of a grpc.aio bidirectional call."""

    async def write(self, request: tokenizer_pb2.ParseManyRequest) -> None: ...

    def cancel(self) -> bool: ...

    def __aiter__(self) -> AsyncIterator[tokenizer_pb2.ParseManyResponse]: ...


class ManyStub(Protocol):
    """What is used of TokenizerServiceStub."""

    def ParseMany(self) -> ManyCall: ...  # noqa: N802


class ParseHub:
    """All choices that are parsed by one tokenizer replica. Belongs to one event loop.

    A call that breaks fails its choices; the next `open` makes a new one.
    """

    def __init__(self, stub: ManyStub) -> None:
        self._stub = stub
        self._connection: _Connection | None = None
        self._next_choice = 0

    def open(self) -> ParseCall:
        """Return a new choice; write its ParseOpen first."""
        if self._connection is None or self._connection.failure is not None:
            self._connection = _Connection(self._stub.ParseMany())
        self._next_choice += 1
        return self._connection.add(self._next_choice)

    async def close(self) -> None:
        """End the call; choices in flight fail."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None


class ParseCall:
    """One choice. Answers come in the order of the writes: one per tokens and per finish."""

    def __init__(self, connection: _Connection, choice: int) -> None:
        self._connection = connection
        self._choice = choice
        self._answers: asyncio.Queue[tokenizer_pb2.ParseManyAnswer | ServiceError] = asyncio.Queue()
        self._done = False

    async def write(self, request: tokenizer_pb2.ParseRequest) -> None:
        """Send an event together with whatever else is sent at this moment.

        A broken call is not reported here but by `read`.
        """
        item = tokenizer_pb2.ParseManyItem(choice=self._choice, request=request)
        self._connection.send(item)

    async def read(self) -> tokenizer_pb2.ParseResponse | None:
        """Return the next answer, None behind the answer to the finish.

        Raises ServiceError when the choice or the call failed.
        """
        if self._done:
            return None
        answer = await self._answers.get()
        if isinstance(answer, ServiceError):
            self._done = True
            raise answer
        if answer.error != common_pb2.ERROR_REASON_UNSPECIFIED:
            self._end()
            raise ServiceError(answer.error, answer.error_message, field=answer.error_field)
        if answer.response.finish_reason != tokenizer_pb2.FINISH_REASON_UNSPECIFIED:
            self._end()
        return answer.response

    def cancel(self) -> None:
        """Forget the choice; harmless once it has ended."""
        if not self._done:
            self._connection.send(tokenizer_pb2.ParseManyItem(choice=self._choice, drop=True))
            self._end()

    def deliver(self, answer: tokenizer_pb2.ParseManyAnswer | ServiceError) -> None:
        """Take an answer; for the connection alone."""
        self._answers.put_nowait(answer)

    def _end(self) -> None:
        self._done = True
        self._connection.forget(self._choice)


class _Connection:
    """One ParseMany call with its reader and writer tasks."""

    def __init__(self, call: ManyCall) -> None:
        self._call = call
        self._calls: dict[int, ParseCall] = {}
        self._waiting: list[tokenizer_pb2.ParseManyItem] = []
        self._wake = asyncio.Event()
        self.failure: ServiceError | None = None
        self._writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())

    def add(self, choice: int) -> ParseCall:
        call = self._calls[choice] = ParseCall(self, choice)
        return call

    def forget(self, choice: int) -> None:
        self._calls.pop(choice, None)

    def send(self, item: tokenizer_pb2.ParseManyItem) -> None:
        if self.failure is None:
            self._waiting.append(item)
            self._wake.set()

    async def close(self) -> None:
        reason = common_pb2.ERROR_REASON_CANCELLED
        self._fail(ServiceError(reason, "the parse call was closed"))
        for task in (self._reader, self._writer):
            with suppress(asyncio.CancelledError):
                await task

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            while self._waiting:
                request = tokenizer_pb2.ParseManyRequest(items=self._batch())
                try:
                    await self._call.write(request)
                except (grpc.RpcError, asyncio.InvalidStateError) as error:
                    logger.debug("parse call broke while writing: %r", error)
                    return
            self._wake.clear()

    def _batch(self) -> list[tokenizer_pb2.ParseManyItem]:
        """Take as many waiting items as one message may hold."""
        size = count = 0
        for item in self._waiting[:_MAX_ITEMS]:
            size += item.ByteSize()
            if count and size > _MAX_BYTES:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _read(self) -> None:
        lost = common_pb2.ERROR_REASON_ENGINE_LOST
        failure = ServiceError(lost, "the tokenizer ended the parse call")
        try:
            async for response in self._call:
                for answer in response.answers:
                    call = self._calls.get(answer.choice)
                    if call is not None:
                        call.deliver(answer)
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
        finally:
            self._fail(failure)

    def _fail(self, failure: ServiceError) -> None:
        """The call is over: every choice in flight learns why, once."""
        if self.failure is not None:
            return
        self.failure = failure
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.deliver(failure)
        self._call.cancel()
        self._writer.cancel()
        self._reader.cancel()
