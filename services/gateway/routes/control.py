"""Endpoints that act on the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response
from warhorse.v1 import engine_pb2

from services.common.describe import build_version
from services.common.errors import from_rpc_error
from services.gateway.body import validate
from services.gateway.engines import EnginePeer
from services.gateway.routes.helpers import body_of, body_schema, json_response
from services.gateway.schema.fields import Lenient, StringOrStrings
from services.gateway.state import GatewayState

CALL_SECONDS = 10.0
T = TypeVar("T")


class AbortRequest(Lenient):
    """Body of an abort. Ids are those of responses, with or without their prefix."""

    request_ids: StringOrStrings | None = Field(None, description="a text or a list of texts")
    rid: StringOrStrings | None = Field(None, description="a text or a list of texts")


def add_routes(app: FastAPI, state: GatewayState) -> None:
    """Abort, cache reset, descriptions."""

    @app.post("/abort_requests", openapi_extra=body_schema(AbortRequest))
    @app.post("/inference/v1/abort_requests", include_in_schema=False)
    @app.post("/abort_request", include_in_schema=False)
    async def abort(request: Request) -> Response:
        """End requests by id; answers with how many there were."""
        body = validate(AbortRequest, await body_of(request, state), {})
        ids = state.live.find(body.request_ids or body.rid or [])
        message = engine_pb2.AbortRequest(request_ids=ids)
        answers = await on_all_engines(state, lambda p: p.stub.Abort(message, timeout=CALL_SECONDS))
        return json_response({"aborted": sum(a.aborted for a in answers)})

    @app.post("/reset_prefix_cache")
    @app.post("/flush_cache", include_in_schema=False)
    @app.get("/flush_cache", include_in_schema=False)
    async def reset_prefix_cache() -> Response:
        """Drop what no running request uses from the prefix caches of all engines."""
        message = engine_pb2.ResetPrefixCacheRequest()
        answers = await on_all_engines(
            state, lambda p: p.stub.ResetPrefixCache(message, timeout=CALL_SECONDS)
        )
        dropped = sum(a.pages_dropped for a in answers)
        return json_response({"success": True, "pages_dropped": dropped})

    @app.get("/server_info")
    @app.get("/get_server_info", include_in_schema=False)
    async def server_info() -> Response:
        """Versions, engines and their caches."""
        engines = [_engine(peer) for peer in state.engines.set.peers]
        return json_response({"version": build_version(), "engines": engines})

    @app.get("/model_info")
    @app.get("/get_model_info", include_in_schema=False)
    async def model_info() -> Response:
        """The served model."""
        facts = await state.facts()
        return json_response(
            {
                "model_path": facts.name,
                "served_model_names": list(state.model_names),
                "is_generation": True,
                "max_model_len": facts.max_model_len,
                "vocab_size": facts.vocab_size,
            }
        )


async def on_all_engines(
    state: GatewayState, call: Callable[[EnginePeer], Awaitable[T]]
) -> list[T]:
    """The answers of all healthy engines. Raises ServiceError where one refuses."""
    try:
        return list(await asyncio.gather(*(call(p) for p in state.engines.set.healthy())))
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def _engine(peer: EnginePeer) -> dict[str, Any]:
    info = peer.info
    return {
        "engine": peer.index,
        "model": info.model.name,
        "family": info.model.family,
        "device": info.device,
        "weight_bytes": info.weight_bytes,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "cache_groups": {g.name: g.total_pages for g in info.cache_groups},
    }
