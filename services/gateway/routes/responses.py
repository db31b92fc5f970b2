"""Endpoints of the Responses interface."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response
from warhorse.v1 import engine_pb2

from services.gateway.body import validate_open
from services.gateway.respond import GenerationResponse
from services.gateway.responses.job import ResponsesJob, unknown_response
from services.gateway.responses.schema import ResponsesRequest
from services.gateway.routes.control import on_all_engines
from services.gateway.routes.helpers import body_of, body_schema, identify, json_response
from services.gateway.state import GatewayState
from services.gateway.unsupported import COMMON_ONLY


def add_routes(app: FastAPI, state: GatewayState) -> None:
    """Create, fetch, delete and cancel responses."""

    @app.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
    async def create(request: Request) -> Response:
        """Continue a conversation, in the Responses interface."""
        body = validate_open(ResponsesRequest, await body_of(request, state), COMMON_ONLY)
        return GenerationResponse(ResponsesJob(body, identify(request, None), state), state)

    @app.get("/v1/responses/{response_id}")
    async def fetch(response_id: str) -> Response:
        """A stored response."""
        stored = state.responses.get(response_id)
        if stored is None:
            raise unknown_response(response_id, "response_id")
        return json_response(stored.body)

    @app.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> Response:
        """Forget a stored response."""
        if not state.responses.drop(response_id):
            raise unknown_response(response_id, "response_id")
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        """End a response that is being generated."""
        ids = state.live.find([response_id])
        stored = state.responses.get(response_id)
        if not ids and stored is None:
            raise unknown_response(response_id, "response_id")
        message = engine_pb2.AbortRequest(request_ids=ids)
        await on_all_engines(state, lambda p: p.stub.Abort(message, timeout=10.0))
        body = stored.body if stored else {"id": response_id, "object": "response"}
        return json_response(body | ({"status": "cancelled"} if ids else {}))
