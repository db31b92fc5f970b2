"""Many choices over one call, with a running service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from warhorse.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

from services.common.errors import ServiceError
from services.tokenizer.client import ParseHub
from tests.service_process import RunDir, ServiceProcess
from tests.tokenizer.conftest import SERVICE
from tests.tokenizer.support import vocabulary

OPEN = tokenizer_pb2.ParseRequest(
    open=tokenizer_pb2.ParseOpen(start_state=tokenizer_pb2.PARSE_STATE_CONTENT)
)
FINISH = tokenizer_pb2.ParseRequest(
    finish=tokenizer_pb2.ParseFinish(reason=tokenizer_pb2.FINISH_REASON_STOP)
)


def tokens(text: str) -> tokenizer_pb2.ParseRequest:
    ids = vocabulary().encode(text)
    return tokenizer_pb2.ParseRequest(tokens=tokenizer_pb2.ParseTokens(token_ids=ids))


@pytest.fixture
async def hub(process: ServiceProcess) -> AsyncIterator[ParseHub]:
    async with grpc.aio.insecure_channel(process.address) as channel:
        hub = ParseHub(tokenizer_pb2_grpc.TokenizerServiceStub(channel))
        yield hub
        await hub.close()


async def say(hub: ParseHub, words: list[str]) -> str:
    call = hub.open()
    await call.write(OPEN)
    text = ""
    for word in words:
        await call.write(tokens(word))
        answer = await call.read()
        assert answer is not None
        text += "".join(delta.content for delta in answer.deltas)
    await call.write(FINISH)
    last = await call.read()
    assert last is not None and last.finish_reason == tokenizer_pb2.FINISH_REASON_STOP
    assert await call.read() is None
    return text


async def test_choices_run_side_by_side(hub: ParseHub) -> None:
    words = [[f"{i}", " of", f" {k}"] for i in range(40) for k in range(2)]
    texts = await asyncio.gather(*(say(hub, w) for w in words))
    assert texts == ["".join(w) for w in words]


async def test_error_of_one_choice_leaves_the_others_alone(hub: ParseHub) -> None:
    bad, good = hub.open(), hub.open()
    await bad.write(tokenizer_pb2.ParseRequest(open=tokenizer_pb2.ParseOpen(stop=[""])))
    await good.write(OPEN)
    with pytest.raises(ServiceError) as caught:
        await bad.read()
    assert caught.value.field == "stop[0]"
    assert await bad.read() is None
    await good.write(tokens("fine"))
    answer = await good.read()
    assert answer is not None and answer.deltas[0].content
    good.cancel()
    good.cancel()


async def test_killed_service_fails_the_choices_and_the_next_life_serves(
    bare_folder: Path,
) -> None:
    run_dir = RunDir()
    flags = ["--model", str(bare_folder)]
    process = ServiceProcess("tokenizer", SERVICE, run_dir.path, flags)
    process.start()
    try:
        async with grpc.aio.insecure_channel(process.address) as channel:
            hub = ParseHub(tokenizer_pb2_grpc.TokenizerServiceStub(channel))
            call = hub.open()
            await call.write(OPEN)
            await call.write(tokens("a"))
            assert await call.read() is not None
            await asyncio.to_thread(process.kill)
            with pytest.raises(ServiceError) as caught:
                await asyncio.wait_for(call.read(), 10)
            assert caught.value.reason == common_pb2.ERROR_REASON_ENGINE_LOST
            await asyncio.to_thread(process.start)
            await channel.channel_ready()
            assert await say(hub, ["b"]) == "b"
            await hub.close()
    finally:
        process.stop()
        run_dir.close()


async def test_stopping_service_ends_what_it_began_and_takes_nothing_new(
    bare_folder: Path,
) -> None:
    run_dir = RunDir()
    process = ServiceProcess("tokenizer", SERVICE, run_dir.path, ["--model", str(bare_folder)])
    process.start()
    try:
        async with grpc.aio.insecure_channel(process.address) as channel:
            hub = ParseHub(tokenizer_pb2_grpc.TokenizerServiceStub(channel))
            begun = hub.open()
            await begun.write(OPEN)
            await begun.write(tokens("a"))
            await begun.read()
            stopping = asyncio.create_task(asyncio.to_thread(process.stop))
            await asyncio.sleep(0.3)
            late = hub.open()
            await late.write(OPEN)
            with pytest.raises(ServiceError) as caught:
                await late.read()
            assert caught.value.reason == common_pb2.ERROR_REASON_DRAINING
            await begun.write(tokens("b"))
            assert await begun.read() is not None
            await begun.write(FINISH)
            assert await begun.read() is not None
            assert await stopping == 0
            await hub.close()
    finally:
        run_dir.close()
