"""Server and channel: errors, request ids, cancellation, limits, sockets, health, reflection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from warhorse.v1 import engine_pb2, engine_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

from services.common.errors import ServiceError, StartupError, from_rpc_error
from services.common.grpc_client import (
    MAX_MESSAGE_BYTES,
    connect,
    request_metadata,
    socket_path,
    socket_target,
)
from services.common.grpc_server import GrpcServer
from services.common.logs import request_id_var
from tests.common.echo_service import LOAD, SERVICE, EchoEngine, EchoTokenizer


@dataclass
class Stack:
    """A running server with both echo servicers and a channel to its socket."""

    server: GrpcServer
    tokenizer: EchoTokenizer
    engine: EchoEngine
    channel: grpc.aio.Channel

    @property
    def tokens(self) -> tokenizer_pb2_grpc.TokenizerServiceAsyncStub:
        return tokenizer_pb2_grpc.TokenizerServiceStub(self.channel)

    @property
    def engines(self) -> engine_pb2_grpc.EngineServiceAsyncStub:
        return engine_pb2_grpc.EngineServiceStub(self.channel)

    async def encode(self, text: str, timeout: float = 5.0) -> bytes:
        request = tokenizer_pb2.EncodeRequest(text=text)
        metadata = request_metadata()
        answer = await self.tokens.Encode(request, timeout=timeout, metadata=metadata)
        return answer.token_ids


@pytest.fixture
async def stack(run_dir: Path) -> AsyncIterator[Stack]:
    server = GrpcServer(
        "tokenizer", "", run_dir, listen="127.0.0.1:0", grace_seconds=1.0, open_ended=[LOAD]
    )
    tokenizer, engine = EchoTokenizer(), EchoEngine()
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(tokenizer, server.server)
    engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, server.server)
    await server.start()
    channel = connect(socket_target(run_dir, "tokenizer"))
    yield Stack(server, tokenizer, engine, channel)
    await channel.close()
    await server.stop()
    assert (tokenizer.open_parses, engine.open_generates, server.in_flight) == (0, 0, 0)


async def refusal(call: object) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call  # type: ignore[misc]
    return from_rpc_error(failed.value)


async def test_the_request_id_reaches_the_handler(stack: Stack) -> None:
    assert await stack.encode("x") == b""
    token = request_id_var.set("req-7")
    try:
        assert await stack.encode("x") == b"req-7"
    finally:
        request_id_var.reset(token)


async def test_a_service_error_arrives_with_reason_field_and_delay(stack: Stack) -> None:
    error = await refusal(stack.encode("refuse"))
    assert (error.reason_name, error.field, error.retry_after) == ("QUEUE_FULL", "text", 0.5)
    assert error.message == "busy"


async def test_a_bug_is_logged_and_answered_without_internals(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        error = await refusal(stack.encode("bug"))
    assert (error.reason_name, error.message) == ("INTERNAL", "internal error")
    assert any("/secret/path" in str(record.exc_info) for record in caplog.records)
    assert await stack.encode("x") == b""


async def test_an_error_of_a_service_behind_passes_through(stack: Stack) -> None:
    stack.tokenizer.forward_to = f"unix:{stack.server.path}"
    error = await refusal(stack.encode("forward"))
    assert (error.reason_name, error.field) == ("QUEUE_FULL", "text")


@pytest.mark.parametrize(("text", "reason"), [("refuse", "QUEUE_FULL"), ("bug", "INTERNAL")])
async def test_errors_in_a_stream_arrive_after_its_messages(
    stack: Stack, text: str, reason: str
) -> None:
    call = stack.tokens.Parse(timeout=5)
    await call.write(tokenizer_pb2.ParseRequest())
    await call.read()
    await call.write(opening(text))
    assert (await refusal(call.read())).reason_name == reason


async def test_only_calls_that_change_nothing_are_repeated(stack: Stack) -> None:
    assert (await refusal(stack.encode("loading"))).reason_name == "LOADING"
    assert stack.tokenizer.calls == 3
    await refusal(stack.encode("refuse"))
    assert stack.tokenizer.calls == 4
    generate = stack.engines.Generate(engine_pb2.GenerateRequest(request_id="loading"), timeout=5)
    assert (await refusal(generate.read())).reason_name == "LOADING"
    assert stack.engine.generates == 1


def opening(request_id: str) -> tokenizer_pb2.ParseRequest:
    request = tokenizer_pb2.ParseRequest()
    request.open.request_id = request_id
    return request


async def wait_until(condition: object, seconds: float = 2.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.002)


async def test_cancelling_a_stream_runs_the_handlers_finally_at_once(stack: Stack) -> None:
    generate = stack.engines.Generate(engine_pb2.GenerateRequest(), timeout=30)
    parse = stack.tokens.Parse(timeout=30)
    await parse.write(tokenizer_pb2.ParseRequest())
    await generate.read()
    await parse.read()
    assert (stack.engine.open_generates, stack.tokenizer.open_parses) == (1, 1)
    assert stack.server.in_flight == 2
    generate.cancel()
    parse.cancel()
    await wait_until(lambda: stack.server.in_flight == 0)
    assert (stack.engine.open_generates, stack.tokenizer.open_parses) == (0, 0)


async def test_a_passed_deadline_cancels_the_handler(stack: Stack) -> None:
    error = await refusal(stack.encode("sleep30", timeout=0.05))
    assert error.reason_name == "DEADLINE"
    await wait_until(lambda: stack.server.in_flight == 0)


async def test_messages_up_to_the_limit_pass_and_larger_ones_are_named(stack: Stack) -> None:
    await stack.encode("x" * (MAX_MESSAGE_BYTES - 100), timeout=30)
    error = await refusal(stack.encode("x" * (MAX_MESSAGE_BYTES + 1), timeout=30))
    assert error.reason_name == "INVALID_FIELD"
    assert "16 MiB" in error.message


async def test_an_unknown_method_is_unsupported(stack: Stack) -> None:
    call = stack.channel.unary_unary("/warhorse.v1.TokenizerService/Nothing")
    assert (await refusal(call(b"", timeout=5))).reason_name == "UNSUPPORTED"


async def test_a_peer_that_is_not_there_is_reported_without_its_address(run_dir: Path) -> None:
    async with connect(socket_target(run_dir, "engine")) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        error = await refusal(stub.Abort(engine_pb2.AbortRequest(), timeout=5))
    assert error.reason_name == "ENGINE_LOST"
    assert str(run_dir) not in error.message


async def test_a_channel_finds_a_restarted_server(run_dir: Path) -> None:
    async with connect(socket_target(run_dir, "tokenizer")) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        for _ in range(2):
            server = GrpcServer("tokenizer", "", run_dir)
            tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(
                EchoTokenizer(), server.server
            )
            await server.start()
            request = tokenizer_pb2.EncodeRequest(text="x")
            await stub.Encode(request, timeout=10, wait_for_ready=True)
            await server.stop()


async def test_a_second_server_on_the_socket_refuses_to_start(stack: Stack, run_dir: Path) -> None:
    with pytest.raises(StartupError, match="in use by a running process"):
        await GrpcServer("tokenizer", "", run_dir).start()
    assert await stack.encode("x") == b""


async def test_two_instances_share_a_run_directory(stack: Stack, run_dir: Path) -> None:
    other = GrpcServer("tokenizer", "tokenizer-1", run_dir)
    await other.start()
    await other.stop()
    assert not other.path.exists()
    assert stack.server.path.exists()
    assert await stack.encode("x") == b""


async def test_a_second_server_on_the_port_refuses_to_start(stack: Stack, run_dir: Path) -> None:
    listen = f"127.0.0.1:{stack.server.tcp_port}"
    other = GrpcServer("tokenizer", "tokenizer-1", run_dir, listen=listen)
    with pytest.raises(StartupError, match="cannot listen on"):
        await other.start()
    assert not other.path.exists()


async def test_a_stale_socket_is_replaced_and_a_file_is_not(run_dir: Path) -> None:
    path = socket_path(run_dir, "engine")
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(StartupError, match="is not a socket"):
        await GrpcServer("engine", "", run_dir).start()
    assert path.read_text() == "precious"


async def test_a_socket_path_that_is_too_long_is_named(run_dir: Path) -> None:
    with pytest.raises(StartupError, match="choose a shorter run directory"):
        await GrpcServer("engine", "", run_dir / ("x" * 90)).start()


async def check(channel: grpc.aio.Channel, name: str) -> str:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def test_health_tells_alive_from_ready(stack: Stack) -> None:
    assert await check(stack.channel, "") == "SERVING"
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await check(stack.channel, SERVICE)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    for serving, name in ((True, "SERVING"), (False, "NOT_SERVING"), (True, "SERVING")):
        stack.server.set_serving(SERVICE, serving)
        await asyncio.sleep(0)
        assert await check(stack.channel, SERVICE) == name


async def listed_services(channel: grpc.aio.Channel) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]), timeout=5)
    answer = await call.read()
    call.cancel()
    return {service.name for service in answer.list_services_response.service}


async def test_reflection_lists_the_services_on_the_socket_only(stack: Stack) -> None:
    names = await listed_services(stack.channel)
    assert {SERVICE, "warhorse.v1.EngineService", "grpc.health.v1.Health"} <= names
    async with connect(f"127.0.0.1:{stack.server.tcp_port}") as tcp:
        assert await check(tcp, "") == "SERVING"
        with pytest.raises(grpc.aio.AioRpcError):
            await listed_services(tcp)


async def test_reflection_on_tcp_can_be_asked_for(run_dir: Path) -> None:
    server = GrpcServer("engine", "", run_dir, listen="127.0.0.1:0", reflection_on_tcp=True)
    await server.start()
    async with connect(f"127.0.0.1:{server.tcp_port}") as tcp:
        assert "grpc.health.v1.Health" in await listed_services(tcp)
    await server.stop()


async def test_calls_are_spread_over_healthy_replicas_only(run_dir: Path) -> None:
    servers = [GrpcServer("tokenizer", f"t-{i}", run_dir, listen="127.0.0.1:0") for i in range(3)]
    servicers = [EchoTokenizer() for _ in servers]
    for number, (server, servicer) in enumerate(zip(servers, servicers, strict=True)):
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server.server)
        await server.start()
        server.set_serving(SERVICE, number != 1)
    target = "ipv4:" + ",".join(f"127.0.0.1:{server.tcp_port}" for server in servers)
    async with connect(target, health_service=SERVICE) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        for _ in range(40):
            await stub.Encode(tokenizer_pb2.EncodeRequest(text="x"), timeout=5)
    for server in servers:
        await server.stop()
    first, second, third = (servicer.calls for servicer in servicers)
    assert second == 0
    assert min(first, third) > 0
    assert first + third == 40
