"""All choices that one tokenizer parses for this gateway, over one ParseMany call."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import grpc
from warhorse.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

from services.common.errors import ServiceError
from services.gateway.calls import read
from services.gateway.choice import Choice

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 << 20  # of tokens and openings in one message; a quarter of the limit

OnLost = Callable[[list[Choice]], None]


class ParseHub:
    """Sends what its choices have, in one message at a time, and hands out the answers.

    While a message is being answered tokens pile up, so messages grow with the load and their
    cost per token falls. When the call breaks, all choices are given to `on_lost`. One event
    loop; the call and its task exist only while there are choices.
    """

    def __init__(self, stub: tokenizer_pb2_grpc.TokenizerServiceStub, on_lost: OnLost) -> None:
        self._stub = stub
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._choices: dict[int, Choice] = {}
        self._numbers_of: dict[Choice, int] = {}
        self._unopened: set[int] = set()
        self._dropped: list[int] = []
        self._dirty: dict[int, None] = {}  # an ordered set
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def attach(self, choice: Choice) -> None:
        """Parse `choice` from its first token."""
        number = next(self._numbers)
        self._choices[number] = choice
        self._numbers_of[choice] = number
        self._unopened.add(number)
        choice.rewind()
        choice.wake = functools.partial(self._mark, number)
        choice.wake()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="parse-hub")

    def detach(self, choice: Choice) -> None:
        """Forget `choice`; nothing of it is delivered any more."""
        number = self._forget(choice)
        if number is not None:
            self._dropped.append(number)
            self._news.set()

    def _forget(self, choice: Choice) -> int | None:
        """Remove `choice`; its number if the tokenizer has opened it, else None."""
        number = self._numbers_of.pop(choice, None)
        if number is None:
            return None
        del self._choices[number]
        self._dirty.pop(number, None)
        if number in self._unopened:
            self._unopened.discard(number)
            return None
        return number

    async def close(self) -> None:
        """End the call."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _mark(self, number: int) -> None:
        if number in self._choices:
            self._dirty[number] = None
            self._news.set()

    async def _run(self) -> None:
        call = self._stub.ParseMany()
        try:
            while True:
                await self._exchange(call)
        except (ServiceError, grpc.RpcError, asyncio.InvalidStateError) as error:
            logger.warning("a tokenizer's parse call broke: %s", error)
        except Exception:
            # A fault of ours: the choices must not wait for answers that nobody reads.
            logger.exception("the parse hub failed")
        finally:
            call.cancel()
        self._lose_all()

    async def _exchange(self, call: Any) -> None:
        """Send one message as soon as there is something to say, and settle its answers."""
        await self._news.wait()
        self._news.clear()
        message = self._collect()
        if not message.items:
            return
        await call.write(message)
        response = await read(call)
        if response is None:
            reason = common_pb2.ERROR_REASON_CANCELLED
            raise ServiceError(reason, "The parser ended the call.")
        for answer in response.answers:
            self._settle(answer)

    def _collect(self) -> tokenizer_pb2.ParseManyRequest:
        message = tokenizer_pb2.ParseManyRequest()
        size = 0
        for number in self._dropped:
            message.items.add(choice=number, drop=True)
        self._dropped.clear()
        while self._dirty and size < MAX_MESSAGE_BYTES:
            number = next(iter(self._dirty))
            del self._dirty[number]
            size += self._add(number, self._choices[number], message)
        if self._dirty:
            self._news.set()
        return message

    def _add(self, number: int, choice: Choice, message: tokenizer_pb2.ParseManyRequest) -> int:
        """Add the events of one choice; returns about how many bytes they take."""
        size = 0
        if number in self._unopened:
            self._unopened.discard(number)
            opening = choice.open_event()
            size += opening.ByteSize()
            message.items.add(choice=number, request=opening)
        event = choice.next_event()
        if event is not None:
            size += 5 * len(event.tokens.token_ids)
            message.items.add(choice=number, request=event)
        return size

    def _settle(self, answer: tokenizer_pb2.ParseManyAnswer) -> None:
        choice = self._choices.get(answer.choice)
        if choice is None:
            return
        if answer.error:
            self._forget(choice)
            error = ServiceError(answer.error, answer.error_message, field=answer.error_field)
            choice.fail(error)
            return
        choice.settle(answer.response)
        if choice.ended:
            self._forget(choice)

    def _lose_all(self) -> None:
        lost = list(self._numbers_of)
        for table in (self._choices, self._numbers_of, self._unopened, self._dirty, self._dropped):
            table.clear()
        self._task = None
        self._on_lost(lost)
