"""Engines and tokenizers that die in mid-request: the same rules hold for every interface."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.gateway.conftest import Stack, serve_gateway, until
from tests.gateway.fakes import FakeEngine, FakeServer, FakeTokenizer, text_reply
from tests.gateway.interfaces import INTERFACES, LOST, RESPONSES, Interface, Stream, read_stream

T = TypeVar("T")
WHOLE = "x" * 60
COUNTS = pytest.mark.parametrize("count", [1, 2])


@dataclass
class Replicas:
    """A gateway in front of several engines and tokenizers."""

    stack: Stack
    engines: list[FakeEngine]
    tokenizers: list[FakeTokenizer]

    async def ask(self) -> list[str]:
        """The texts of whole answers, one of every interface, asked for at once."""
        return await self._every(self._ask)

    async def read(self) -> list[Stream]:
        """Streams to their ends, one of every interface at once."""
        return await self._every(self._read)

    async def _every(self, work: Callable[[Interface], Awaitable[T]]) -> list[T]:
        return await asyncio.gather(*(work(interface) for interface in INTERFACES.values()))

    async def _ask(self, interface: Interface) -> str:
        body = interface.body("Hi", 100)
        answer = await self.stack.http.post(interface.path, json=body)
        assert answer.status_code == 200, answer.text
        return interface.whole(answer.json())

    async def _read(self, interface: Interface) -> Stream:
        body = interface.body("Hi", 100) | {"stream": True}
        answer = await self.stack.http.post(interface.path, json=body)
        assert answer.status_code == 200, answer.text
        return read_stream(interface, answer.text)

    @property
    def requests(self) -> int:
        """Requests that engines were given."""
        return sum(len(engine.requests) for engine in self.engines)

    async def lose(self, peer: FakeServer) -> None:
        """Kill a peer; where it is the only one of its kind, start it again."""
        await peer.kill()
        if len(self.engines) == 1:
            await peer.start()

    async def settle(self) -> None:
        """Until nothing of any request is left anywhere."""
        state = self.stack.app.state.gateway
        await until(lambda: all(e.running == 0 for e in self.engines))
        await until(lambda: all(t.open_choices == 0 for t in self.tokenizers if t.server))
        peers = (*state.engines.set.peers, *state.tokenizers.set.peers)
        assert [p.inflight for p in peers] == [0] * len(peers)
        assert not any(p.hub._requests for p in state.engines.set.peers)
        assert not any(p.hub._choices for p in state.tokenizers.set.peers)
        assert (await self.stack.http.get("/load")).json() == {"server_load": 0}
        assert not state.live._engine_ids
        assert state.queue.waiting == 0


MakeReplicas = Callable[[int], Awaitable[Replicas]]


@pytest.fixture
async def make_replicas() -> AsyncIterator[MakeReplicas]:
    """Starts so many engines and tokenizers; afterwards nothing may be left of any request."""
    async with AsyncExitStack() as stack:
        made: list[Replicas] = []

        async def make(count: int) -> Replicas:
            run_dir = Path(tempfile.mkdtemp(prefix="wh-"))
            stack.callback(shutil.rmtree, run_dir)
            engines = [FakeEngine(run_dir / f"engine-{i}.sock") for i in range(count)]
            tokenizers = [FakeTokenizer(run_dir / f"tokenizer-{i}.sock") for i in range(count)]
            for peer in (*engines, *tokenizers):
                stack.push_async_callback(peer.kill)
                await peer.start()
            for engine in engines:
                engine.replies = [text_reply(WHOLE, delay=0.005)]
                engine.load.draining = engine is not engines[0]  # the first one gets it all
            targets = {
                "engine_address": tuple(e.target for e in engines),
                "tokenizer_address": tuple(t.target for t in tokenizers),
            }
            served = await serve_gateway(stack, engines[0], tokenizers[0], targets)
            state = served.app.state.gateway
            for peers in (state.engines.set, state.tokenizers.set):
                await until(lambda peers=peers: len(peers.healthy()) == count)
            await until(lambda: all(p.load.draining for p in state.engines.set.peers[1:]))
            made.append(Replicas(served, engines, tokenizers))
            return made[-1]

        yield make
        for one in made:
            await one.settle()


@COUNTS
async def test_streams_whose_engine_dies_end_with_an_error(
    make_replicas: MakeReplicas, count: int
) -> None:
    replicas = await make_replicas(count)
    engine = replicas.engines[0]
    reading = asyncio.create_task(replicas.read())
    await until(lambda: engine.sent_tokens > 30)
    await replicas.lose(engine)
    for stream, error in zip(await asyncio.wait_for(reading, 2), LOST.values(), strict=True):
        stream.assert_failed(error)
        assert WHOLE.startswith(stream.text) and 0 < len(stream.text) < len(WHOLE)
    assert replicas.requests == len(INTERFACES), "what was sent is not sent again"
    assert set(await replicas.ask()) == {WHOLE}


@COUNTS
async def test_streams_that_sent_nothing_begin_again(
    make_replicas: MakeReplicas, count: int
) -> None:
    replicas = await make_replicas(count)
    engine = replicas.engines[0]
    held = text_reply("lost", hold=asyncio.Event())
    engine.replies = [held] * len(INTERFACES) + [text_reply(WHOLE)]
    reading = asyncio.create_task(replicas.read())
    await until(lambda: engine.running == len(INTERFACES))
    await replicas.lose(engine)
    for stream in await reading:
        stream.assert_complete()
        assert stream.text == WHOLE
    assert replicas.requests == 2 * len(INTERFACES)


@COUNTS
async def test_bodies_in_the_making_begin_again(make_replicas: MakeReplicas, count: int) -> None:
    replicas = await make_replicas(count)
    engine = replicas.engines[0]
    asking = asyncio.create_task(replicas.ask())
    await until(lambda: engine.sent_tokens > 30)
    await replicas.lose(engine)
    assert set(await asking) == {WHOLE}
    assert replicas.requests == 2 * len(INTERFACES)


@COUNTS
async def test_streams_outlive_their_tokenizers(make_replicas: MakeReplicas, count: int) -> None:
    replicas = await make_replicas(count)
    reading = asyncio.create_task(replicas.read())
    await until(lambda: replicas.engines[0].sent_tokens > 30)
    await replicas.lose(next(t for t in replicas.tokenizers if t.open_choices))
    for stream in await reading:
        stream.assert_complete()
        assert stream.text == WHOLE
    assert replicas.requests == len(INTERFACES), "the engine went on"
    assert set(await replicas.ask()) == {WHOLE}


async def test_streams_with_no_tokenizer_left_end_with_an_error(
    make_replicas: MakeReplicas,
) -> None:
    replicas = await make_replicas(1)
    replicas.stack.app.state.gateway.tokenizers.set.wait_seconds = 0.2
    reading = asyncio.create_task(replicas.read())
    await until(lambda: replicas.engines[0].sent_tokens > 30)
    await replicas.tokenizers[0].kill()
    for stream, error in zip(await asyncio.wait_for(reading, 3), LOST.values(), strict=True):
        stream.assert_failed(error)
        assert WHOLE.startswith(stream.text)


async def test_a_broken_response_is_not_kept(make_replicas: MakeReplicas) -> None:
    replicas = await make_replicas(1)
    reading = asyncio.create_task(replicas.read())
    await until(lambda: replicas.engines[0].sent_tokens > 30)
    await replicas.lose(replicas.engines[0])
    (broken,) = [s for s in await reading if s.interface is RESPONSES]
    response_id = broken.events[-1]["response"]["id"]
    answer = await replicas.stack.http.get(f"/v1/responses/{response_id}")
    assert answer.status_code == 404
