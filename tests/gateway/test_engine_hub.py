"""The hub of an engine: one call for many requests, and what happens when one of them fails."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from warhorse.v1 import common_pb2, engine_pb2

from services.common.errors import ServiceError
from services.gateway.engine_hub import MAX_REQUEST_BYTES, TAKEN_STEP, EngineHub


class Call:
    """A GenerateMany call whose answers the test gives."""

    def __init__(self) -> None:
        self.messages: list[engine_pb2.GenerateManyRequest] = []
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False

    async def write(self, message: engine_pb2.GenerateManyRequest) -> None:
        self.messages.append(message)

    async def read(self) -> Any:
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self) -> None:
        self.cancelled = True

    def answer(self, *answers: engine_pb2.GenerateManyAnswer) -> None:
        self.answers.put_nowait(engine_pb2.GenerateManyResponse(answers=answers))

    @property
    def items(self) -> list[engine_pb2.GenerateManyItem]:
        return [item for message in self.messages for item in message.items]


class Stub:
    """Opens a fresh call each time."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def GenerateMany(self) -> Call:  # noqa: N802
        self.calls.append(Call())
        return self.calls[-1]


class Reader:
    """Notes what it hears; `fault` is raised for every event."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.events: list[engine_pb2.GenerateResponse] = []
        self.failures: list[ServiceError] = []
        self._fault = fault

    def on_event(self, event: engine_pb2.GenerateResponse) -> None:
        if self._fault is not None:
            raise self._fault
        self.events.append(event)

    def on_failure(self, error: ServiceError) -> None:
        self.failures.append(error)


@pytest.fixture
async def stub() -> Stub:
    return Stub()


@pytest.fixture
async def hub(stub: Stub) -> Any:
    hub = EngineHub(stub)  # type: ignore[arg-type]
    yield hub
    await hub.close()
    assert all(call.cancelled for call in stub.calls) and not hub._requests


async def settle() -> None:
    """Run everything that can run."""
    for _ in range(10):
        await asyncio.sleep(0)


def tokens(number: int, *ids: int) -> engine_pb2.GenerateManyAnswer:
    event = engine_pb2.GenerateResponse(chunk=engine_pb2.TokenChunk(token_ids=ids))
    return engine_pb2.GenerateManyAnswer(request=number, events=[event])


def prompt(nbytes: int) -> engine_pb2.GenerateRequest:
    return engine_pb2.GenerateRequest(prompt_token_ids=bytes(nbytes))


async def test_requests_share_a_call_and_a_message(hub: EngineHub, stub: Stub) -> None:
    readers = [Reader(), Reader()]
    for reader in readers:
        hub.open(prompt(4), 2.5, reader)
    await settle()
    (call,) = stub.calls
    assert [item.timeout_seconds for item in call.messages[0].items] == [2.5, 2.5]
    call.answer(tokens(1, 5), tokens(2, 6))
    await settle()
    assert [list(r.events[0].chunk.token_ids) for r in readers] == [[5], [6]]


async def test_a_reader_that_fails_ends_its_own_request(hub: EngineHub, stub: Stub) -> None:
    refusal = ServiceError(common_pb2.ERROR_REASON_NUMERIC, "not finite")
    readers = [Reader(ValueError("a fault")), Reader(refusal), Reader()]
    for reader in readers:
        hub.open(prompt(4), None, reader)
    await settle()
    stub.calls[0].answer(*(tokens(n, 7) for n in (1, 2, 3)))
    await settle()
    assert readers[0].failures[0].reason == common_pb2.ERROR_REASON_INTERNAL
    assert readers[1].failures == [refusal]
    assert len(readers[2].events) == 1 and readers[2].failures == []
    assert [item.request for item in stub.calls[0].items if item.drop] == [1, 2]


async def test_a_broken_call_fails_its_requests_and_the_next_one_opens_another(
    hub: EngineHub, stub: Stub
) -> None:
    lost, later = Reader(), Reader()
    hub.open(prompt(4), None, lost)
    await settle()
    metadata = grpc.aio.Metadata()
    broken = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata)
    stub.calls[0].answers.put_nowait(broken)
    await settle()
    assert [e.reason for e in lost.failures] == [common_pb2.ERROR_REASON_ENGINE_LOST]
    hub.open(prompt(4), None, later)
    await settle()
    assert len(stub.calls) == 2 and len(stub.calls[1].items) == 1
    stub.calls[1].answer(tokens(2, 3))
    await settle()
    assert len(later.events) == 1


async def test_a_dropped_request_hears_nothing_more(hub: EngineHub, stub: Stub) -> None:
    reader = Reader()
    request = hub.open(prompt(4), None, reader)
    await settle()
    request.drop()
    request.drop()
    stub.calls[0].answer(tokens(1, 5))
    await settle()
    assert reader.events == reader.failures == []
    assert [item.drop for item in stub.calls[0].items] == [False, True]


async def test_tokens_are_acknowledged_in_steps(hub: EngineHub, stub: Stub) -> None:
    request = hub.open(prompt(4), None, Reader())
    for _ in range(TAKEN_STEP + 1):
        request.taken(1)
    await settle()
    assert [item.taken for item in stub.calls[0].items] == [0, TAKEN_STEP]


async def test_large_requests_travel_in_messages_of_their_own(hub: EngineHub, stub: Stub) -> None:
    size = MAX_REQUEST_BYTES - 64
    for _ in range(2):
        hub.open(prompt(size), None, Reader())
    await settle()
    assert [len(message.items) for message in stub.calls[0].messages] == [1, 1]


async def test_a_request_that_fits_no_message_is_refused(hub: EngineHub, stub: Stub) -> None:
    with pytest.raises(ServiceError) as refused:
        hub.open(prompt(MAX_REQUEST_BYTES), None, Reader())
    assert refused.value.reason == common_pb2.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED
    assert stub.calls == []
