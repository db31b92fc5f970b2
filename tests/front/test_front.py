"""The front over real gRPC, with a core that says exactly what the test wants."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.stage_pb2 import CoreRefusal, CoreStep
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.common.errors import from_rpc_error
from services.engine import outbox
from services.engine.server import SERVICE_NAME
from tests.front.helpers import (
    FakeCore,
    Served,
    failure_of,
    kinds,
    make_request,
    read_all,
    serve_front,
    tokens_of,
    wait_until,
)

STOP = FinishReason.FINISH_REASON_STOP


async def submitted(core: FakeCore, count: int = 1) -> int:
    """Wait until `count` requests have reached the core; the handle of the last."""
    await wait_until(lambda: len(core.submitted) >= count)
    return core.submitted[count - 1].handle


async def serving(served: Served) -> bool:
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    answer = await health_pb2_grpc.HealthStub(served.channel).Check(request, timeout=5)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_events_arrive_in_order() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        call = served.stub.Generate(make_request(), timeout=10)
        handle = await submitted(core)
        core.accept(handle)
        core.prompt_done(handle)
        core.tokens(handle, 5)
        core.tokens(handle, 6, 7)
        core.finish(handle, reason=STOP, completion_tokens=3)
        events = await read_all(call)
    assert kinds(events) == ["accepted", "prompt_done", "chunk", "finished"]
    assert tokens_of(events) == [5, 6, 7]
    assert core.aborted == []


async def test_tokens_merge_while_the_reader_is_busy_and_stay_apart_without_merging() -> None:
    for merge, chunks in ((True, 1), (False, 5)):
        core = FakeCore()
        async with serve_front(core, merge_tokens=merge) as served:
            call = served.stub.Generate(make_request(), timeout=10)
            handle = await submitted(core)
            core.accept(handle)
            for token in range(5):
                core.tokens(handle, token)
            core.finish(handle, reason=STOP, completion_tokens=5)
            events = await read_all(call)
        assert tokens_of(events) == [0, 1, 2, 3, 4]
        assert kinds(events).count("chunk") == chunks


async def test_merged_chunks_keep_logprobs_beside_their_tokens() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        call = served.stub.Generate(make_request(), timeout=10)
        handle = await submitted(core)
        for token in (5, 6):
            entry = pb.TokenLogprob(token_id=token, logprob=-token)
            chunk = pb.TokenChunk(token_ids=[token], logprobs=[entry])
            core.say(handle, pb.GenerateResponse(chunk=chunk))
        core.finish(handle, reason=STOP)
        events = await read_all(call)
    entries = [entry.token_id for event in events for entry in event.chunk.logprobs]
    assert entries == tokens_of(events) == [5, 6]


async def test_choices_are_merged_apart() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        call = served.stub.Generate(make_request(n=2, sampling__temperature=1.0), timeout=10)
        handle = await submitted(core)
        for token in range(4):
            core.tokens(handle, token, choice=token % 2)
        core.finish(handle, 1, reason=STOP)
        core.tokens(handle, 8)
        core.finish(handle, 0, reason=STOP)
        events = await read_all(call)
    assert tokens_of(events, 0) == [0, 2, 8]
    assert tokens_of(events, 1) == [1, 3]
    assert kinds(events)[-1] == "finished"


@pytest.mark.parametrize("moment", ["queued", "prefill", "decode"])
async def test_cancel_aborts_in_the_core(moment: str) -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        call = served.stub.Generate(make_request(), timeout=10)
        handle = await submitted(core)
        if moment != "queued":
            core.accept(handle)
        if moment == "decode":
            core.prompt_done(handle)
            core.tokens(handle, 1)
        call.cancel()
        await wait_until(lambda: core.aborted == [handle])
        core.tokens(handle, 2)  # a late update of the aborted request does no harm


async def test_deadline_of_a_queued_request_aborts_it() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        call = served.stub.Generate(make_request(), timeout=0.3)
        handle = await submitted(core)
        seconds = (core.submitted[0].deadline_ns - time.monotonic_ns()) / 1e9
        assert 0 < seconds <= 0.3
        error = await failure_of(call)
        assert error.reason == ErrorReason.ERROR_REASON_DEADLINE
        await wait_until(lambda: core.aborted == [handle])


async def test_same_request_id_twice_is_told_apart_in_the_core() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        calls = [served.stub.Generate(make_request(), timeout=10) for _ in range(2)]
        await submitted(core, 2)
        assert len({s.request_id for s in core.submitted}) == 2
        answer = await served.stub.Abort(pb.AbortRequest(request_ids=["req-1", "x"]), timeout=5)
        assert answer.aborted == 2
        for call in calls:
            events = await read_all(call)
            assert events[-1].finished.reason == FinishReason.FINISH_REASON_ABORT
            assert events[-1].finished.error == ErrorReason.ERROR_REASON_CANCELLED
    assert len(core.aborted) == 2


async def test_abort_keeps_the_tokens_before_it_and_counts_them() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        call = served.stub.Generate(make_request(n=2, sampling__temperature=1.0), timeout=10)
        handle = await submitted(core)
        core.tokens(handle, 4, 5, choice=1)
        await served.stub.Abort(pb.AbortRequest(request_ids=["req-1"]), timeout=5)
        core.tokens(handle, 6, choice=1)
        events = await read_all(call)
    counts = {
        e.finished.choice: e.finished.completion_tokens for e in events if "finished" in str(e)
    }
    assert counts == {0: 0, 1: 2}
    assert tokens_of(events, 1) == [4, 5]


async def test_refusal_of_the_core_becomes_the_status_of_the_call() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        call = served.stub.Generate(make_request(), timeout=10)
        handle = await submitted(core)
        reason = ErrorReason.ERROR_REASON_POOL_EXHAUSTED
        core.refuse(handle, CoreRefusal(reason=reason, message="no", retry_after_seconds=2.5))
        error = await failure_of(call)
    assert (error.reason, error.retry_after, error.message) == (reason, 2.5, "no")
    assert core.aborted == []


async def test_full_queue_refuses_with_a_time_to_come_again() -> None:
    core = FakeCore()
    async with serve_front(core, max_waiting_tokens=10) as served:
        first = served.stub.Generate(make_request([1] * 8), timeout=10)
        handle = await submitted(core)
        error = await failure_of(served.stub.Generate(make_request([1] * 3), timeout=10))
        assert error.reason == ErrorReason.ERROR_REASON_QUEUE_FULL
        assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.retry_after is not None
        core.accept(handle)
        core.prompt_done(handle)  # it waits no more: there is room again
        second = served.stub.Generate(make_request([1] * 3), timeout=10)
        await submitted(core, 2)
        for call in (first, second):
            call.cancel()
        await wait_until(lambda: served.front.live_requests == 0)


async def test_numeric_failure_ends_one_choice_alone() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        calls = [served.stub.Generate(make_request(), timeout=10) for _ in range(2)]
        await submitted(core, 2)
        bad, good = (s.handle for s in core.submitted)
        core.finish(
            bad,
            reason=FinishReason.FINISH_REASON_ERROR,
            error=ErrorReason.ERROR_REASON_NUMERIC,
            error_message="nan",
        )
        core.tokens(good, 1)
        core.finish(good, reason=STOP, completion_tokens=1)
        answers = [await read_all(call) for call in calls]
    ends = sorted((events[-1].finished.error, len(tokens_of(events))) for events in answers)
    assert ends == [(0, 1), (ErrorReason.ERROR_REASON_NUMERIC, 0)]


async def test_lost_core_fails_every_stream_and_health() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        assert await serving(served)
        calls = [served.stub.Generate(make_request(), timeout=10) for _ in range(3)]
        await submitted(core, 3)
        core.tokens(core.submitted[0].handle, 1)
        core.the_listener.on_lost("the engine core ended unexpectedly")
        for call in calls:
            error = await failure_of(call)
            assert error.reason == ErrorReason.ERROR_REASON_ENGINE_LOST
            assert error.code == grpc.StatusCode.UNAVAILABLE
        assert not await serving(served)
        core.become_ready()
        assert await serving(served)


async def test_nothing_is_taken_before_the_core_is_ready() -> None:
    core = FakeCore(ready_at_start=False)
    async with serve_front(core) as served:
        assert not await serving(served)
        error = await failure_of(served.stub.Generate(make_request(), timeout=10))
        assert error.reason == ErrorReason.ERROR_REASON_LOADING
        with pytest.raises(grpc.RpcError) as caught:
            await served.stub.DescribeEngine(pb.DescribeEngineRequest(), timeout=2)
        assert from_rpc_error(caught.value).reason == ErrorReason.ERROR_REASON_LOADING


async def test_drain_refuses_new_requests_and_waits_for_the_running_one() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        call = served.stub.Generate(make_request(), timeout=10)
        handle = await submitted(core)
        drained = asyncio.ensure_future(_drain(served))
        await wait_until(lambda: served.front.load.latest().draining)
        assert not await serving(served)
        error = await failure_of(served.stub.Generate(make_request(), timeout=10))
        assert error.reason == ErrorReason.ERROR_REASON_DRAINING
        assert not drained.done()
        core.finish(handle, reason=STOP)
        await read_all(call)
        await asyncio.wait_for(drained, 2)


async def _drain(served: Served) -> None:
    await served.stub.Drain(pb.DrainRequest(), timeout=10)


async def test_silent_prefill_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PROGRESS_SECONDS", 0.5)
    core = FakeCore()
    async with serve_front(core) as served:
        call = served.stub.Generate(make_request([1] * 300), timeout=10)
        handle = await submitted(core)
        core.accept(handle, prompt_tokens=300)
        progress = pb.Progress(prefilled_tokens=128, total_tokens=300)
        core.say(handle, pb.GenerateResponse(progress=progress))
        await asyncio.sleep(2.2)
        core.prompt_done(handle)
        core.finish(handle, reason=STOP)
        events = await read_all(call)
    reports = [e.progress for e in events if e.HasField("progress")]
    assert 1 <= len(reports) <= 3
    assert {(r.prefilled_tokens, r.total_tokens) for r in reports} == {(128, 300)}


async def test_reader_that_takes_nothing_is_ended() -> None:
    """Messages of 100 tokens are pushed for ever; the client reads none of them."""
    core = FakeCore()
    async with serve_front(core) as served:
        call = served.stub.Generate(make_request(), timeout=60)
        handle = await submitted(core)
        core.accept(handle)
        for _ in range(20_000):
            core.tokens(handle, *range(100, 200))
            await asyncio.sleep(0)
            if core.aborted:
                break
        await wait_until(lambda: core.aborted == [handle])
        error = await failure_of(call)
    assert error.reason == ErrorReason.ERROR_REASON_SLOW_CONSUMER
    assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_error_reaches_a_reader_whose_first_message_is_on_its_way() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        call = served.stub.Generate(make_request(), timeout=10)
        handle = await submitted(core)
        core.accept(handle)
        (stream,) = served.front._outboxes.values()
        while stream._writing_since is None:
            await asyncio.sleep(0)
        core.tokens(handle, *range(outbox.MAX_UNSENT_TOKENS + 1))
        assert core.aborted == [], "the write is given up in the same turn"
        error = await failure_of(call)
        assert core.aborted == [handle]
    assert error.reason == ErrorReason.ERROR_REASON_SLOW_CONSUMER


async def test_stalled_reader_is_ended_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens wait, but the write in flight makes no progress."""
    monkeypatch.setattr(outbox, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(outbox, "MAX_UNSENT_TOKENS", 1 << 40)
    core = FakeCore()
    async with serve_front(core) as served:
        call = served.stub.Generate(make_request(), timeout=60)
        handle = await submitted(core)
        core.accept(handle)
        deadline = time.monotonic() + 20
        many = [(1 << 31) + i for i in range(5000)]
        while not core.aborted and time.monotonic() < deadline:
            core.tokens(handle, *many)
            await asyncio.sleep(0.005)
        assert core.aborted == [handle]
        error = await failure_of(call)
    assert error.reason == ErrorReason.ERROR_REASON_SLOW_CONSUMER


async def test_load_is_pushed_on_change_and_at_least_once_a_second() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        stream = served.stub.Load(pb.LoadRequest())
        reader = aiter(stream)
        first = await anext(reader)
        step = CoreStep(load=pb.LoadResponse(running=3, waiting=2, kv_usage=0.5, silence_ms=4))
        core.the_listener.on_step(step)
        while (load := await anext(reader)).running != 3:
            pass
        assert (load.waiting, load.kv_usage, load.draining) == (2, 0.5, False)
        assert load.sequence > first.sequence
        started = time.monotonic()
        again = await anext(reader)
        assert time.monotonic() - started > 0.5
        assert again.sequence == load.sequence
        stream.cancel()


async def test_describe_and_reset_come_from_the_core() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        answer = await served.stub.DescribeEngine(pb.DescribeEngineRequest(), timeout=5)
        assert (answer.model.name, answer.weight_bytes) == ("test-model", 11)
        assert answer.service.instance_id == "engine-0"
        reset = await served.stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(), timeout=5)
        assert reset.pages_dropped == 3


async def test_invalid_request_never_reaches_the_core() -> None:
    core = FakeCore()
    async with serve_front(core) as served:
        error = await failure_of(served.stub.Generate(make_request(n=0), timeout=10))
    assert (error.reason, error.field) == (ErrorReason.ERROR_REASON_INVALID_FIELD, "n")
    assert core.submitted == []
