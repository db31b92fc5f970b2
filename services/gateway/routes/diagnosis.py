"""A generation as a health check, and the profiler's switches."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from starlette.responses import Response
from warhorse.v1 import engine_pb2

from services.gateway.completions import CompletionJob
from services.gateway.errors import UNAVAILABLE, ApiError
from services.gateway.generation import EventStream
from services.gateway.routes.control import on_all_engines
from services.gateway.routes.helpers import identify, json_response
from services.gateway.schema.completion import CompletionRequest
from services.gateway.state import GatewayState

GENERATE_SECONDS = 20.0
PROFILE_SECONDS = 300.0  # writing a long trace takes its time


def add_routes(app: FastAPI, state: GatewayState) -> None:
    """Whether a token can be made; profiling."""

    @app.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """200 when an engine has just generated a token."""
        try:
            async with asyncio.timeout(GENERATE_SECONDS):
                await _generate_one(identify(request, None), state)
        except TimeoutError:
            message = f"No token was generated within {GENERATE_SECONDS:.0f} s."
            raise ApiError(503, UNAVAILABLE, message) from None
        return Response(status_code=200)

    @app.post("/start_profile")
    async def start_profile() -> Response:
        """Let all engines record their steps; 501 where they have no folder for traces."""
        return await profile(start=True)

    @app.post("/stop_profile")
    async def stop_profile() -> Response:
        """Write what was recorded; answers with the names of the files."""
        return await profile(start=False)

    async def profile(*, start: bool) -> Response:
        message = engine_pb2.ProfileEngineRequest(start=start)
        answers = await on_all_engines(
            state, lambda p: p.stub.ProfileEngine(message, timeout=PROFILE_SECONDS)
        )
        return json_response({"files": [a.file for a in answers if a.file]})


async def _generate_one(request_id: str, state: GatewayState) -> None:
    """One token behind a prompt of one token. Raises what any generation raises."""
    fields = {"prompt": [0], "max_tokens": 1, "temperature": 0.0}
    body = CompletionRequest.model_validate(fields)
    plans = await CompletionJob(body, request_id, state).prepare()
    async with EventStream(plans, state.engines, state.tokenizers) as stream:
        while await stream.take() is not None:
            pass
