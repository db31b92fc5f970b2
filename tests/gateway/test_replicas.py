"""Which of several engines gets a request, and what happens when one goes away."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from warhorse.v1 import common_pb2, engine_pb2

from services.common.errors import ServiceError
from services.common.prefix_chain import SHORT_BYTES, HashChain, root_hash
from tests.gateway.conftest import Stack, serve_gateway, until
from tests.gateway.fakes import FakeEngine, FakeTokenizer, text_reply
from tests.gateway.sse import parse_frames
from tests.gateway.vocabulary import ids

UNIT = 16
FINGERPRINT = "0123456789abcdef"
LONG = "The quick brown fox jumps over the lazy dog again and again." * 4


class UnitEngine(FakeEngine):
    """An engine with a prefix cache in units."""

    async def DescribeEngine(self, request, context):  # noqa: N802
        answer = await super().DescribeEngine(request, context)
        answer.unit_tokens = UNIT
        return answer

    def hold(self, text: str, *, salt: str = "") -> None:
        """Report the units of `text` as cached."""
        chain = HashChain(root_hash(FINGERPRINT, salt), UNIT)
        chain.extend(ids(text))
        packed = b"".join(h[:SHORT_BYTES] for h in chain.hashes)
        self.load = engine_pb2.LoadResponse(prefixes_reset=True, prefixes_added=packed)


@dataclass
class Pair:
    stack: Stack
    engines: tuple[UnitEngine, UnitEngine]

    async def complete(self, prompt: str, **fields: object) -> int:
        """Run one completion; the number of the engine that got it."""
        before = [len(e.requests) for e in self.engines]
        answer = await self.stack.http.post("/v1/completions", json={"prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        got = [len(e.requests) - n for e, n in zip(self.engines, before, strict=True)]
        assert sorted(got) == [0, 1]
        return got.index(1)

    async def settle(self) -> None:
        """Wait until the gateway has heard of the engines' prefixes."""
        peers = self.stack.app.state.gateway.engines.set.peers
        wanted = [len(e.load.prefixes_added) // SHORT_BYTES for e in self.engines]
        await until(lambda: [len(p.prefixes) for p in peers] == wanted)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        run_dir = Path(tempfile.mkdtemp(prefix="wh-"))
        stack.callback(shutil.rmtree, run_dir)
        engines = UnitEngine(run_dir / "engine-0.sock"), UnitEngine(run_dir / "engine-1.sock")
        tokenizer = FakeTokenizer(run_dir / "tokenizer.sock")
        for peer in (*engines, tokenizer):
            stack.push_async_callback(peer.kill)
            await peer.start()
        for engine in engines:
            engine.load = engine_pb2.LoadResponse(prefixes_reset=True)
        targets = tuple(e.target for e in engines)
        served = await serve_gateway(stack, engines[0], tokenizer, {"engine_address": targets})
        state = served.app.state.gateway
        await until(lambda: len(state.engines.set.healthy()) == 2)
        yield Pair(served, engines)


@pytest.mark.parametrize("holder", [0, 1])
async def test_request_goes_where_its_prefix_is_cached(pair: Pair, holder: int) -> None:
    pair.engines[holder].hold(LONG)
    await pair.settle()
    assert await pair.complete(LONG + " And?") == holder
    assert await pair.complete(LONG[: 5 * UNIT]) == holder


async def test_longer_of_two_prefixes_wins(pair: Pair) -> None:
    pair.engines[0].hold(LONG[: 2 * UNIT])
    pair.engines[1].hold(LONG[: 6 * UNIT])
    await pair.settle()
    assert await pair.complete(LONG) == 1


async def test_salt_parts_the_caches(pair: Pair) -> None:
    pair.engines[0].hold("")
    pair.engines[1].hold(LONG, salt="mine")
    await pair.settle()
    assert await pair.complete(LONG, cache_salt="mine") == 1
    assert await pair.complete(LONG) == 0


async def test_a_long_queue_outweighs_a_short_prefix(pair: Pair) -> None:
    pair.engines[1].hold(LONG[: 2 * UNIT])
    pair.engines[1].load.waiting_tokens = 5000
    await pair.settle()
    peers = pair.stack.app.state.gateway.engines.set.peers
    await until(lambda: peers[1].load.waiting_tokens == 5000)
    assert await pair.complete(LONG) == 0


async def test_running_requests_spread(pair: Pair) -> None:
    for engine in pair.engines:
        engine.replies = [text_reply("x" * 16, delay=0.02)]
    await asyncio.gather(*(
        pair.stack.http.post("/v1/completions", json={"prompt": "a"}) for _ in range(8)
    ))  # fmt: skip
    assert [len(e.requests) for e in pair.engines] == [4, 4]


@pytest.mark.parametrize(
    "reason", [common_pb2.ERROR_REASON_QUEUE_FULL, common_pb2.ERROR_REASON_DRAINING]
)
async def test_refused_request_runs_on_the_other_engine(pair: Pair, reason: int) -> None:
    pair.engines[0].replies = [text_reply("", error=ServiceError(reason, "no"))]
    pair.engines[0].hold(LONG)
    await pair.settle()
    answer = await pair.stack.http.post("/v1/completions", json={"prompt": LONG})
    assert answer.json()["choices"][0]["text"] == "Hello!"
    assert [len(e.requests) for e in pair.engines] == [1, 1]


async def test_request_of_a_killed_engine_begins_again_on_the_other(pair: Pair) -> None:
    hold = asyncio.Event()
    pair.engines[0].replies = [text_reply("never", hold=hold)]
    pair.engines[0].hold(LONG)
    await pair.settle()
    body = {"prompt": LONG, "stream": True}
    running = asyncio.create_task(pair.stack.http.post("/v1/completions", json=body))
    await until(lambda: pair.engines[0].running == 1)
    await pair.engines[0].kill()
    frames = parse_frames((await running).text)
    assert "".join(choice["text"] for choice in frames.choices) == "Hello!" and frames.done
    assert len(pair.engines[1].requests) == 1


async def test_draining_engine_gets_nothing_new(pair: Pair) -> None:
    pair.engines[0].hold(LONG)
    pair.engines[0].load.draining = True
    await pair.settle()
    peers = pair.stack.app.state.gateway.engines.set.peers
    await until(lambda: peers[0].load.draining)
    assert await pair.complete(LONG) == 1
