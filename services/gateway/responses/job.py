"""POST /v1/responses: a chat completion in the Responses interface."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from services.gateway.chat import ChatJob
from services.gateway.errors import NOT_FOUND, ApiError, bad_request, shorten
from services.gateway.generation import EventStream
from services.gateway.origins import FieldNames, chat_of, take_origins
from services.gateway.plan import GenerationPlan
from services.gateway.respond import Writer
from services.gateway.responses.body import ResponseHead
from services.gateway.responses.convert import NAMES, chat_fields, conversation
from services.gateway.responses.schema import ResponsesRequest
from services.gateway.responses.store import StoredResponse
from services.gateway.responses.tools import ToolNames
from services.gateway.responses.writers import ResponseBodyWriter, ResponseStreamWriter
from services.gateway.schema.chat import ChatRequest
from services.gateway.state import GatewayState


class ResponsesJob(ChatJob):
    """One response."""

    id_prefix = "resp_"

    def __init__(self, request: ResponsesRequest, request_id: str, state: GatewayState) -> None:
        if request.background:
            raise bad_request("`background` responses are not supported.", "background")
        self._responses = request
        self._names = ToolNames.of(request.tools or ())
        self._history = history_of(request, state)
        chat, fields = as_chat(request, self._names, self._history)
        super().__init__(chat, request_id, state, fields)
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
        take_origins(messages)  # indexes of this request mean nothing to the next one
        self.state.responses.put(StoredResponse(body, messages))


def as_chat(
    request: ResponsesRequest, names: ToolNames, history: Sequence[dict[str, Any]]
) -> tuple[ChatRequest, FieldNames]:
    """The chat request of the same meaning, and its field names. Raises ApiError 400."""
    return chat_of(chat_fields(request, names, history), NAMES)


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
