"""An engine in the benchmark's own process that notes when it hands over each token."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from warhorse.v1 import common_pb2, engine_pb2, engine_pb2_grpc, tokenizer_pb2

from services.common.grpc_client import socket_path
from tests.gateway.pipeline import MAX_MODEL_LEN, MODEL

PERIOD = 0.02  # seconds between tokens of a stream
TOKEN = 40  # some ordinary byte


class StampedEngine(engine_pb2_grpc.EngineServiceServicer):
    """Sends one token per message at a steady pace; `stamps` are times by request.

    Keys are the client's request ids up to the first dash, values perf_counter seconds.
    """

    def __init__(self, run_dir: Path) -> None:
        self.stamps: dict[str, list[float]] = {}
        self._socket = socket_path(run_dir, "engine")
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._socket.parent.mkdir(parents=True, exist_ok=True)
        self._server = grpc.aio.server()
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, self._server)
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        await servicer.set("warhorse.v1.EngineService", health_pb2.HealthCheckResponse.SERVING)
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def Generate(self, request, context):  # noqa: N802
        """max_tokens tokens, one every 20 ms."""
        yield engine_pb2.GenerateResponse(accepted=engine_pb2.Accepted())
        loop = asyncio.get_running_loop()
        due = loop.time()
        stamps = self.stamps.setdefault(request.request_id.partition("-")[0], [])
        for _ in range(request.stopping.max_tokens):
            due += PERIOD
            await asyncio.sleep(due - loop.time())
            chunk = engine_pb2.TokenChunk(token_ids=[TOKEN])
            stamps.append(time.perf_counter())
            yield engine_pb2.GenerateResponse(chunk=chunk)
        finished = engine_pb2.Finished(reason=tokenizer_pb2.FINISH_REASON_LENGTH)
        yield engine_pb2.GenerateResponse(finished=finished)

    async def DescribeEngine(self, request, context):  # noqa: N802
        """The facts that the gateway asks for."""
        info = common_pb2.ModelInfo(name=MODEL, vocab_size=400, max_model_len=MAX_MODEL_LEN)
        return engine_pb2.DescribeEngineResponse(model=info)

    async def Load(self, request, context):  # noqa: N802
        """One idle record a second."""
        while True:
            yield engine_pb2.LoadResponse()
            await asyncio.sleep(1)
