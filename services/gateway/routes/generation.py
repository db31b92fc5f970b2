"""Endpoints that generate."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from services.gateway.body import validate
from services.gateway.chat import ChatJob
from services.gateway.completions import CompletionJob
from services.gateway.respond import GenerationResponse, Job
from services.gateway.routes.helpers import body_of, body_schema, identify
from services.gateway.schema.chat import ChatRequest
from services.gateway.schema.completion import CompletionRequest
from services.gateway.state import GatewayState
from services.gateway.unsupported import CHAT, COMPLETION


def add_routes(app: FastAPI, state: GatewayState) -> None:
    """Chat completions and completions."""

    def respond(job: Job) -> Response:
        return GenerationResponse(job, state)

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        body = validate(ChatRequest, await body_of(request, state), CHAT)
        return respond(ChatJob(body, identify(request, body.request_id), state))

    @app.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue a text or a list of token ids."""
        body = validate(CompletionRequest, await body_of(request, state), COMPLETION)
        return respond(CompletionJob(body, identify(request, body.request_id), state))
