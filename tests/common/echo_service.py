"""Servicers that do what their request's text says; also a service process for signal tests.

python -m tests.common.echo_service RUN_DIR GRACE_SECONDS
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from warhorse.v1 import engine_pb2, engine_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

from services.common import lifecycle
from services.common.errors import ErrorReason, ServiceError
from services.common.grpc_client import connect
from services.common.grpc_server import GrpcServer
from services.common.logs import request_id_var

SERVICE = "warhorse.v1.TokenizerService"
LOAD = "/warhorse.v1.EngineService/Load"


def misbehave(text: str) -> None:
    """Raise what `text` asks for."""
    if text == "refuse":
        raise ServiceError(
            ErrorReason.ERROR_REASON_QUEUE_FULL, "busy", field="text", retry_after=0.5
        )
    if text == "loading":
        raise ServiceError(ErrorReason.ERROR_REASON_LOADING, "loading")
    if text == "bug":
        raise KeyError("/secret/path")


class EchoTokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Encode answers with the request id's bytes; Parse echoes; both misbehave when told to."""

    def __init__(self) -> None:
        self.open_parses = 0
        self.calls = 0
        self.forward_to = ""

    async def Encode(  # noqa: N802
        self, request: tokenizer_pb2.EncodeRequest, context: Any
    ) -> tokenizer_pb2.EncodeResponse:
        self.calls += 1
        misbehave(request.text)
        if request.text.startswith("sleep"):
            await asyncio.sleep(float(request.text.removeprefix("sleep")))
        if request.text == "forward":
            async with connect(self.forward_to) as channel:
                stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
                await stub.Encode(tokenizer_pb2.EncodeRequest(text="refuse"), timeout=5)
        return tokenizer_pb2.EncodeResponse(token_ids=request_id_var.get().encode())

    async def Parse(  # noqa: N802
        self, requests: AsyncIterator[tokenizer_pb2.ParseRequest], context: Any
    ) -> AsyncIterator[tokenizer_pb2.ParseResponse]:
        self.open_parses += 1
        try:
            async for request in requests:
                misbehave(request.open.request_id)
                yield tokenizer_pb2.ParseResponse()
        finally:
            self.open_parses -= 1


class EchoEngine(engine_pb2_grpc.EngineServiceServicer):
    """Load streams for ever through context.write; Generate streams one message and waits."""

    def __init__(self) -> None:
        self.open_generates = 0
        self.generates = 0

    async def Load(self, request: engine_pb2.LoadRequest, context: Any) -> None:  # noqa: N802
        while True:
            await context.write(engine_pb2.LoadResponse())
            await asyncio.sleep(0.01)

    async def Generate(  # noqa: N802
        self, request: engine_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[engine_pb2.GenerateResponse]:
        self.open_generates += 1
        self.generates += 1
        try:
            misbehave(request.request_id)
            yield engine_pb2.GenerateResponse()
            await asyncio.sleep(60)
        finally:
            self.open_generates -= 1


async def serve(run_dir: str, grace: str) -> None:
    server = GrpcServer(
        "tokenizer", "tokenizer-0", Path(run_dir), grace_seconds=float(grace), open_ended=[LOAD]
    )
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(EchoTokenizer(), server.server)
    engine_pb2_grpc.add_EngineServiceServicer_to_server(EchoEngine(), server.server)
    await server.start()
    server.set_serving(SERVICE, True)
    sys.stdout.write("ready\n")
    sys.stdout.flush()

    async def on_drain() -> None:
        sys.stdout.write("draining\n")
        sys.stdout.flush()

    await server.run_until_signal(on_drain)


if __name__ == "__main__":
    sys.exit(lifecycle.run("echo", lambda: serve(*sys.argv[1:])))
