"""kill -9 of real processes in mid-stream, with two engines and every chat interface at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.gateway.interfaces import INTERFACES, LOST, Interface, Stream, read_stream
from tests.gateway.pipeline import GatewayProcess, Pipeline, running_pipeline
from tests.service_process import eventually
from tests.tokenizer.support import reference

WORD = reference().encode("a").ids
LENGTH = 120
TALE, NOVEL = "Tell me.", "Tell me all."
SCRIPT = [
    {"when": {"prompt_contains": NOVEL}, "token_ids": WORD * 3000, "delay_ms": 8},
    {"when": {}, "token_ids": WORD * LENGTH, "delay_ms": 8},
]
WHOLE = "a" * LENGTH


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with running_pipeline(SCRIPT, engines=2) as running:
        yield running


@pytest.fixture
def at_rest(pipeline: Pipeline) -> Iterator[None]:
    """Afterwards both engines serve and run nothing, and the gateway has no file more open."""
    eventually(lambda: engine_loads(pipeline.gateway) == [0, 0])
    gateway = psutil.Process(pipeline.gateway.process.pid)
    before = gateway.num_fds()
    yield
    eventually(lambda: engine_loads(pipeline.gateway) == [0, 0])
    eventually(lambda: gateway.num_fds() <= before)
    assert httpx.get(f"{pipeline.url}/load").json() == {"server_load": 0}


def engine_loads(gateway: GatewayProcess) -> list[int]:
    """Running requests of each engine, as the gateway has heard."""
    loads = httpx.get(f"{gateway.url}/v1/loads").json()["loads"]
    return [load["num_running_reqs"] for load in loads]


async def read(
    gateway: GatewayProcess,
    interface: Interface,
    text: str = TALE,
    under_way: asyncio.Event | None = None,
) -> Stream:
    """A stream to its end; `under_way` is set when some of it came."""
    body = interface.body(text, 3000) | {"stream": True}
    parts: list[str] = []
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
        http.stream("POST", interface.path, json=body) as answer,
    ):
        assert answer.status_code == 200
        async for part in answer.aiter_text():
            parts.append(part)
            if under_way is not None and len(parts) > 10:
                under_way.set()
    return read_stream(interface, "".join(parts))


async def begin(pipeline: Pipeline, text: str = TALE) -> list[asyncio.Task[Stream]]:
    """A stream of every interface on each engine; some of each came."""
    starts, reading = [], []
    for interface in INTERFACES.values():
        for _ in pipeline.engines:
            starts.append(asyncio.Event())
            work = read(pipeline.gateway, interface, text, starts[-1])
            reading.append(asyncio.create_task(work))
    await asyncio.wait_for(asyncio.gather(*(start.wait() for start in starts)), 5)
    return reading


@pytest.mark.usefixtures("at_rest")
async def test_streams_of_the_other_engine_go_on(pipeline: Pipeline) -> None:
    reading = await begin(pipeline)
    pipeline.engines[0].kill()
    streams = await asyncio.gather(*reading)
    failed = [stream for stream in streams if stream.text != WHOLE]
    assert [stream.interface for stream in failed] == list(INTERFACES.values())
    for stream, error in zip(failed, LOST.values(), strict=True):
        stream.assert_failed(error)
        assert WHOLE.startswith(stream.text) and stream.text
    for stream in streams:
        if stream not in failed:
            stream.assert_complete()
    (await read(pipeline.gateway, INTERFACES["chat"])).assert_complete()
    await asyncio.to_thread(pipeline.engines[0].start)


@pytest.mark.usefixtures("at_rest")
async def test_streams_go_on_with_the_next_tokenizer(pipeline: Pipeline) -> None:
    reading = await begin(pipeline)
    pipeline.tokenizer.kill()
    await asyncio.to_thread(pipeline.tokenizer.start)
    for stream in await asyncio.gather(*reading):
        stream.assert_complete()
        assert stream.text == WHOLE


async def test_engines_drop_what_a_dead_gateway_asked_for(
    pipeline: Pipeline,
) -> None:
    """The last test of these processes: their gateway is another one in the end."""
    flags = ["--engine-address", ",".join(engine.address for engine in pipeline.engines)]
    other = GatewayProcess(pipeline.run_dir, flags)
    try:
        await asyncio.to_thread(other.wait_until_healthy)
        reading = await begin(pipeline, NOVEL)
        pipeline.gateway.process.kill()
        ends = await asyncio.gather(*reading, return_exceptions=True)
        assert all(isinstance(end, httpx.TransportError) for end in ends), ends
        await asyncio.to_thread(eventually, lambda: engine_loads(other) == [0, 0], 3.0)
        later = await asyncio.gather(*(read(other, i) for i in INTERFACES.values()))
        for stream in later:
            stream.assert_complete()
    finally:
        other.stop()
