"""Endpoints that generate."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from services.gateway.body import validate, validate_open
from services.gateway.chat import ChatJob, render_chat
from services.gateway.completions import CompletionJob
from services.gateway.messages.convert import NAMES, chat_fields
from services.gateway.messages.job import MessagesJob
from services.gateway.messages.schema import CountRequest, MessagesRequest
from services.gateway.origins import chat_of
from services.gateway.respond import GenerationResponse, Job
from services.gateway.routes.helpers import body_of, body_schema, identify, json_response
from services.gateway.schema.chat import ChatRequest
from services.gateway.schema.completion import CompletionRequest
from services.gateway.schema.native import TokensRequest
from services.gateway.state import GatewayState
from services.gateway.token_job import TokensJob
from services.gateway.unsupported import CHAT, COMMON_ONLY


def add_routes(app: FastAPI, state: GatewayState) -> None:
    """Chat completions, completions, messages, and tokens alone."""

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
        body = validate(CompletionRequest, await body_of(request, state), COMMON_ONLY)
        return respond(CompletionJob(body, identify(request, body.request_id), state))

    @app.post("/inference/v1/generate", openapi_extra=body_schema(TokensRequest))
    async def generate(request: Request) -> Response:
        """Continue token ids; answers with token ids."""
        body = validate(TokensRequest, await body_of(request, state), {})
        return respond(TokensJob(body, identify(request, body.request_id), state))

    @app.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Continue a conversation, in the Anthropic interface."""
        body = validate_open(MessagesRequest, await body_of(request, state), {})
        chat, names = chat_of(chat_fields(body), NAMES)
        return respond(MessagesJob(chat, identify(request, None), state, names))

    @app.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountRequest))
    async def count_tokens(request: Request) -> Response:
        """Tokens that a message would send to the model, its tools included."""
        body = validate_open(CountRequest, await body_of(request, state), {})
        chat, names = chat_of(chat_fields(body), NAMES)
        with names.applied():
            prompt = await render_chat(chat, state, await state.facts(chat.model))
        return json_response({"input_tokens": prompt.length})
