"""Endpoints that show what the model would see, without generating."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response
from warhorse.v1 import tokenizer_pb2

from services.gateway.body import validate, validate_open
from services.gateway.chat import check_chat, render_chat
from services.gateway.completions import completion_prompt
from services.gateway.messages.convert import NAMES, chat_fields
from services.gateway.messages.schema import CountRequest
from services.gateway.origins import chat_of
from services.gateway.plan import Prompt
from services.gateway.responses.job import as_chat, history_of
from services.gateway.responses.schema import ResponsesRequest
from services.gateway.responses.tools import ToolNames
from services.gateway.routes.helpers import body_of, body_schema, json_response
from services.gateway.sampling import ModelFacts, check_ids, check_request, check_text_size
from services.gateway.schema.chat import ChatRequest
from services.gateway.schema.completion import CompletionRequest
from services.gateway.schema.tokens import Detokenize, TokenizeChat, TokenizeText
from services.gateway.state import GatewayState
from services.gateway.tokens import pack, unpack
from services.gateway.unsupported import CHAT, COMMON_ONLY


def add_routes(app: FastAPI, state: GatewayState) -> None:
    """Tokenise, detokenise, render."""

    @app.post("/tokenize", openapi_extra=body_schema(TokenizeText, TokenizeChat))
    async def tokenize(request: Request) -> Response:
        """Tokens of a text or of a conversation, exactly as a generation would see them."""
        fields = await body_of(request, state)
        if "messages" in fields:
            chat = validate(TokenizeChat, fields, CHAT)
            facts = await state.facts(chat.model)
            ids = unpack((await render_chat(chat, state, facts)).token_ids)
            return json_response(await _tokens(state, facts, ids, chat.return_token_strs))
        text = validate(TokenizeText, fields, {})
        facts = await state.facts(text.model)
        ids = await _text_ids(text, state, facts)
        return json_response(await _tokens(state, facts, ids, text.return_token_strs))

    @app.post("/detokenize", openapi_extra=body_schema(Detokenize))
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        body = validate(Detokenize, await body_of(request, state), {})
        facts = await state.facts(body.model)
        check_ids("tokens", body.tokens, facts)
        text = await state.tokenizers.decode(pack(body.tokens))
        return json_response({"prompt": text})

    @app.post("/v1/chat/completions/render", openapi_extra=body_schema(ChatRequest))
    async def render_chat_prompt(request: Request) -> Response:
        """The prompt that a chat completion would be given."""
        return await _rendered(validate(ChatRequest, await body_of(request, state), CHAT), state)

    @app.post("/v1/messages/render", openapi_extra=body_schema(CountRequest))
    async def render_message_prompt(request: Request) -> Response:
        """The prompt that a message would be given."""
        body = validate_open(CountRequest, await body_of(request, state), {})
        chat, fields = chat_of(chat_fields(body), NAMES)
        with fields.applied():
            return await _rendered(chat, state)

    @app.post("/v1/responses/render", openapi_extra=body_schema(ResponsesRequest))
    async def render_response_prompt(request: Request) -> Response:
        """The prompt that a response would be given."""
        body = validate_open(ResponsesRequest, await body_of(request, state), COMMON_ONLY)
        names = ToolNames.of(body.tools or ())
        chat, fields = as_chat(body, names, history_of(body, state))
        with fields.applied():
            return await _rendered(chat, state)

    @app.post("/v1/completions/render", openapi_extra=body_schema(CompletionRequest))
    async def render_completion_prompts(request: Request) -> Response:
        """The prompts that a completion would be given, in a list."""
        body = validate(CompletionRequest, await body_of(request, state), COMMON_ONLY)
        facts = await state.facts(body.model)
        check_request(body, facts)
        prompts = [await completion_prompt(p, body, state, facts) for p in body.prompt]
        return json_response([_shown(prompt, facts) for prompt in prompts])


async def _rendered(chat: ChatRequest, state: GatewayState) -> Response:
    facts = await state.facts(chat.model)
    check_chat(chat, facts)
    return json_response(_shown(await render_chat(chat, state, facts), facts))


async def _text_ids(text: TokenizeText, state: GatewayState, facts: ModelFacts) -> list[int]:
    check_text_size(len(text.prompt), facts, "prompt")
    encoding = tokenizer_pb2.EncodeRequest(text=text.prompt)
    encoding.add_special_tokens = text.add_special_tokens is not False
    return unpack(await state.tokenizers.encode(encoding))


async def _tokens(
    state: GatewayState, facts: ModelFacts, ids: Sequence[int], texts: bool | None
) -> dict[str, Any]:
    shown = None
    if texts:
        pieces = await state.tokenizers.token_bytes(ids)
        shown = [piece.decode("utf-8", "replace") for piece in pieces]
    limit = facts.max_model_len
    return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": shown}


def _shown(prompt: Prompt, facts: ModelFacts) -> dict[str, Any]:
    return {
        "count": prompt.length,
        "max_model_len": facts.max_model_len,
        "prompt_text": prompt.text,
        "prompt_token_ids": unpack(prompt.token_ids),
    }
