"""POST /v1/responses: a chat completion in the Responses interface."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from services.gateway.body import validate
from services.gateway.chat import ChatJob
from services.gateway.errors import NOT_FOUND, ApiError, bad_request, shorten
from services.gateway.generation import EventStream
from services.gateway.plan import GenerationPlan
from services.gateway.respond import Writer
from services.gateway.responses.body import ResponseHead
from services.gateway.responses.convert import chat_fields, conversation
from services.gateway.responses.schema import ResponsesRequest
from services.gateway.responses.store import StoredResponse
from services.gateway.responses.tools import ToolNames
from services.gateway.responses.writers import ResponseBodyWriter, ResponseStreamWriter
from services.gateway.schema.chat import ChatRequest
from services.gateway.state import GatewayState
from services.gateway.unsupported import CHAT


class ResponsesJob(ChatJob):
    """One response."""

    id_prefix = "resp_"

    def __init__(self, request: ResponsesRequest, request_id: str, state: GatewayState) -> None:
        if request.background:
            raise bad_request("`background` responses are not supported.", "background")
        self._responses = request
        self._names = ToolNames.of(request.tools or ())
        self._history = history_of(request, state)
        super().__init__(as_chat(request, self._names, self._history), request_id, state)
        self._head = ResponseHead("", 0, "", request, self._names)

    async def prepare(self) -> Sequence[GenerationPlan]:
        """Check, render, resolve."""
        plans = await super().prepare()
        envelope = self.envelope
        self._head = ResponseHead(
            envelope.id, int(time.time()), envelope.model, self._responses, self._names
        )
        return plans

    def writer(self, stream: EventStream) -> Writer:
        """Events or one body."""
        kind = ResponseStreamWriter if self.streaming else ResponseBodyWriter
        return kind(self._head, stream, self._keep)

    def _keep(self, body: dict[str, Any]) -> None:
        if self._responses.store is False:
            return
        messages = [*self._history, *conversation(self._responses.input)]
        messages += conversation(body["output"])
        self.state.responses.put(StoredResponse(body, messages))


def as_chat(
    request: ResponsesRequest, names: ToolNames, history: Sequence[dict[str, Any]]
) -> ChatRequest:
    """The chat request of the same meaning. Raises ApiError 400."""
    return validate(ChatRequest, chat_fields(request, names, history), CHAT)


def history_of(request: ResponsesRequest, state: GatewayState) -> list[dict[str, Any]]:
    """The conversation that the request goes on with. Raises ApiError 404."""
    wanted = request.previous_response_id
    if wanted is None:
        return []
    stored = state.responses.get(wanted)
    if stored is None:
        raise unknown_response(wanted, "previous_response_id")
    return stored.messages


def unknown_response(response_id: str, param: str) -> ApiError:
    """404 for a response that is not in the store."""
    message = f"The response `{shorten(response_id, 80)}` does not exist or is no longer stored."
    return ApiError(404, NOT_FOUND, message, param=param)
