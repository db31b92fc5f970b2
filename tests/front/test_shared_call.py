"""Many requests over one GenerateMany call: together in messages, apart in everything else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.common.errors import ServiceError, from_rpc_error
from services.engine import outbox
from tests.front.helpers import (
    FakeCore,
    Served,
    kinds,
    make_request,
    serve_front,
    tokens_of,
    wait_until,
)

STOP = FinishReason.FINISH_REASON_STOP


class Client:
    """One call; reads in the background and sorts the answers by request."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.call = served.stub.GenerateMany()
        self.messages: list[pb.GenerateManyResponse] = []
        self.error: grpc.RpcError | None = None
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for message in self.call:
                self.messages.append(message)
        except grpc.RpcError as error:
            self.error = error

    async def say(self, **item: Any) -> None:
        items = [pb.GenerateManyItem(**item)]
        await self.call.write(pb.GenerateManyRequest(items=items))

    async def open(self, *numbers: int, **changes: Any) -> None:
        items = [pb.GenerateManyItem(request=n, open=make_request(**changes)) for n in numbers]
        await self.call.write(pb.GenerateManyRequest(items=items))

    def answers(self, number: int) -> list[pb.GenerateManyAnswer]:
        return [a for m in self.messages for a in m.answers if a.request == number]

    def events(self, number: int) -> list[pb.GenerateResponse]:
        return [event for answer in self.answers(number) for event in answer.events]

    def tokens(self, number: int) -> list[int]:
        return tokens_of(self.events(number))

    def error_of(self, number: int) -> int:
        return max((answer.error for answer in self.answers(number)), default=0)


@contextlib.asynccontextmanager
async def client_of(core: FakeCore, **config: Any) -> AsyncIterator[Client]:
    async with serve_front(core, **config) as served:
        client = Client(served)
        try:
            yield client
        finally:
            client.call.cancel()
            await asyncio.gather(client.task, return_exceptions=True)
            await wait_until(lambda: served.front.live_requests == 0)


async def handles(core: FakeCore, count: int) -> list[int]:
    await wait_until(lambda: len(core.submitted) >= count)
    return [submit.handle for submit in core.submitted]


async def test_requests_of_a_call_share_messages_and_keep_their_events_apart() -> None:
    core = FakeCore()
    async with client_of(core) as client:
        await client.open(7, 9)
        first, second = await handles(core, 2)
        for handle, token in ((first, 1), (second, 2), (first, 3)):
            core.tokens(handle, token)
        core.finish(first, reason=STOP)
        await wait_until(lambda: "finished" in kinds(client.events(7)))
        assert client.tokens(7) == [1, 3] and client.tokens(9) == [2]
        assert len(client.messages) == 1
        core.tokens(second, 4)
        core.finish(second, reason=STOP)
        await wait_until(lambda: "finished" in kinds(client.events(9)))
        assert client.tokens(9) == [2, 4]
        await wait_until(lambda: client.served.front.live_requests == 0)
    assert core.aborted == []


@pytest.mark.parametrize(("merge", "chunks"), [(True, 1), (False, 3)])
async def test_tokens_merge_only_where_they_may(merge: bool, chunks: int) -> None:
    core = FakeCore()
    async with client_of(core, merge_tokens=merge) as client:
        await client.open(1)
        (handle,) = await handles(core, 1)
        for token in range(3):
            core.tokens(handle, token)
        await wait_until(lambda: client.tokens(1) == [0, 1, 2])
        assert kinds(client.events(1)).count("chunk") == chunks


async def test_a_dropped_request_is_aborted_alone() -> None:
    core = FakeCore()
    async with client_of(core) as client:
        await client.open(1, 2)
        first, second = await handles(core, 2)
        await client.say(request=1, drop=True)
        await wait_until(lambda: core.aborted == [first])
        core.tokens(first, 5)
        core.tokens(second, 6)
        await wait_until(lambda: client.tokens(2) == [6])
        assert client.answers(1) == []


async def test_a_refused_request_says_why_and_others_go_on() -> None:
    core = FakeCore()
    async with client_of(core, max_waiting_tokens=4) as client:
        await client.open(1)
        await client.open(2, sampling__temperature=-1.0)
        await client.open(3)
        await wait_until(lambda: client.error_of(2) > 0 and client.error_of(3) > 0)
        (bad,), (full,) = client.answers(2), client.answers(3)
        assert bad.error == ErrorReason.ERROR_REASON_INVALID_FIELD
        assert bad.error_field and "temperature" in bad.error_message
        assert full.error == ErrorReason.ERROR_REASON_QUEUE_FULL and full.retry_after_seconds == 1
        (handle,) = await handles(core, 1)
        core.tokens(handle, 4)
        await wait_until(lambda: client.tokens(1) == [4])


async def test_a_number_in_use_ends_the_call() -> None:
    core = FakeCore()
    async with client_of(core) as client:
        await client.open(1)
        await client.open(1)
        await wait_until(lambda: client.error is not None)
        assert client.error is not None
        error = from_rpc_error(client.error)
        assert (error.reason, error.field) == (ErrorReason.ERROR_REASON_INVALID_FIELD, "request")


async def test_the_deadline_of_a_request_ends_it_alone() -> None:
    core = FakeCore()
    async with client_of(core) as client:
        await client.say(request=1, open=make_request(), timeout_seconds=0.1)
        await client.open(2)
        first, second = await handles(core, 2)
        await wait_until(lambda: client.error_of(1) == ErrorReason.ERROR_REASON_DEADLINE)
        await wait_until(lambda: core.aborted == [first])
        core.tokens(second, 1)
        await wait_until(lambda: client.tokens(2) == [1])


async def test_the_end_of_the_call_aborts_all_its_requests() -> None:
    core = FakeCore()
    async with client_of(core) as client:
        await client.open(1, 2)
        opened = await handles(core, 2)
        client.call.cancel()
        await wait_until(lambda: sorted(core.aborted) == opened)


async def test_a_lost_core_fails_every_request_and_the_call_goes_on() -> None:
    core = FakeCore()
    async with client_of(core) as client:
        await client.open(1, 2)
        await handles(core, 2)
        core.the_listener.on_lost("the core died")
        lost = ErrorReason.ERROR_REASON_ENGINE_LOST
        await wait_until(lambda: client.error_of(1) == client.error_of(2) == lost)
        core.become_ready()
        await client.open(3)
        handle = (await handles(core, 3))[-1]
        core.tokens(handle, 8)
        await wait_until(lambda: client.tokens(3) == [8])


async def test_tokens_that_nobody_takes_are_held_back_for_that_request_alone() -> None:
    core = FakeCore()
    async with client_of(core) as client:
        await client.open(1, 2)
        slow, quick = await handles(core, 2)
        window = outbox.WINDOW_TOKENS
        core.tokens(slow, *range(window))
        await wait_until(lambda: len(client.tokens(1)) == window)
        core.tokens(slow, 5, 6)
        core.tokens(quick, 7)
        await wait_until(lambda: client.tokens(2) == [7])
        await asyncio.sleep(0.05)
        assert len(client.tokens(1)) == window
        assert client.served.front.unsent_tokens(slow) == 2
        await client.say(request=1, taken=1)
        await wait_until(lambda: client.tokens(1)[window:] == [5, 6])


async def test_a_reader_that_takes_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "STALL_SECONDS", 0.2)
    core = FakeCore()
    async with client_of(core) as client:
        await client.open(1, 2)
        slow, quick = await handles(core, 2)
        core.tokens(slow, *range(outbox.WINDOW_TOKENS))
        await wait_until(lambda: len(client.tokens(1)) == outbox.WINDOW_TOKENS)
        core.tokens(slow, 5)
        await wait_until(lambda: client.error_of(1) == ErrorReason.ERROR_REASON_SLOW_CONSUMER)
        await wait_until(lambda: core.aborted == [slow])
        core.tokens(quick, 7)
        await wait_until(lambda: client.tokens(2) == [7])


async def test_a_drain_ends_when_the_requests_of_a_call_have_ended() -> None:
    core = FakeCore()
    async with client_of(core) as client:
        await client.open(1)
        (handle,) = await handles(core, 1)
        drain = asyncio.create_task(client.served.front.drain())
        await asyncio.sleep(0.05)
        await client.open(2)
        await wait_until(lambda: client.error_of(2) == ErrorReason.ERROR_REASON_DRAINING)
        assert not drain.done()
        core.tokens(handle, 3)
        core.finish(handle, reason=STOP)
        await asyncio.wait_for(drain, 5)
        await wait_until(lambda: "finished" in kinds(client.events(1)))


class HeldCompiler:
    """Compiles nothing before it is told to; refuses then what a request calls hostile."""

    def __init__(self) -> None:
        self.held = asyncio.Event()
        self.asked = 0

    async def complete(self, grammar: pb.Grammar) -> None:
        self.asked += 1
        await self.held.wait()
        if grammar.regex == "hostile":
            reason = ErrorReason.ERROR_REASON_INVALID_FIELD
            raise ServiceError(reason, "grammar: takes too much time", field="grammar")

    async def close(self) -> None:
        return None


async def test_requests_go_on_while_grammars_of_others_are_compiled() -> None:
    core, compiler = FakeCore(), HeldCompiler()
    async with client_of(core, grammars=compiler) as client:
        for number in range(200):
            regex = "hostile" if number % 2 else "good"
            await client.open(number, grammar__regex=regex)
        await wait_until(lambda: compiler.asked == 200)
        await client.open(200)
        (handle,) = await handles(core, 1)
        core.tokens(handle, 5)
        core.finish(handle, reason=STOP)
        await wait_until(lambda: "finished" in kinds(client.events(200)))
        assert client.tokens(200) == [5] and len(client.messages) <= 2
        compiler.held.set()
        assert len(await handles(core, 101)) == 101
        invalid = ErrorReason.ERROR_REASON_INVALID_FIELD
        await wait_until(lambda: all(client.error_of(n) == invalid for n in range(1, 200, 2)))
