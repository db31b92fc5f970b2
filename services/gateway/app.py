"""The HTTP application: routes, error handlers, layers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from services.common.describe import build_version
from services.gateway.body import MEBIBYTE, read_json, validate
from services.gateway.cards import cards
from services.gateway.chat import ChatJob
from services.gateway.completions import CompletionJob
from services.gateway.config import GatewayConfig
from services.gateway.errors import NOT_FOUND, SCHEMA, ApiError, shorten, to_api_error
from services.gateway.identity import request_id
from services.gateway.middleware import ApiKeys, RequestIds
from services.gateway.respond import GenerationResponse, Job
from services.gateway.schema.chat import ChatRequest
from services.gateway.schema.completion import CompletionRequest
from services.gateway.state import GatewayState
from services.gateway.unsupported import CHAT, COMPLETION


def create_app(config: GatewayConfig) -> FastAPI:
    """The application; its peers are connected while its lifespan runs (`app.state.gateway`)."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await state.start()
        try:
            yield
        finally:
            await state.stop()

    state = GatewayState.create(config)
    docs: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(
        title="Warhorse",
        version=build_version(),
        root_path=config.root_path,
        lifespan=lifespan,
        redirect_slashes=False,
        **(docs if config.disable_fastapi_docs else {}),
    )
    app.state.gateway = state
    _add_generation_routes(app, state)
    _add_model_routes(app, state)
    _add_status_routes(app, state)
    _add_error_handlers(app)
    _add_layers(app, state)
    return app


def _add_generation_routes(app: FastAPI, state: GatewayState) -> None:
    max_bytes = state.config.max_body_mb * MEBIBYTE

    def respond(job: Job) -> Response:
        return GenerationResponse(job, state.engines, state.tokenizers, state.patience)

    def identify(request: Request, from_body: str | None) -> str:
        return request_id(
            request.scope["client_request_id"], from_body or request.scope["request_id"]
        )

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        body = validate(ChatRequest, await read_json(request, max_bytes), CHAT)
        return respond(ChatJob(body, identify(request, body.request_id), state))

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue a text or a list of token ids."""
        body = validate(CompletionRequest, await read_json(request, max_bytes), COMPLETION)
        return respond(CompletionJob(body, identify(request, body.request_id), state))


def _body_schema(model: type[ChatRequest] | type[CompletionRequest]) -> dict[str, Any]:
    schema = model.model_json_schema()
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def _add_model_routes(app: FastAPI, state: GatewayState) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> Response:
        """The served models."""
        return _json({"object": "list", "data": cards(state, created)})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """One served model."""
        for card in cards(state, created):
            if card["id"] == model_id:
                return _json(card)
        message = f"The model `{shorten(model_id)}` does not exist."
        raise ApiError(404, NOT_FOUND, message, param="model")


def _add_status_routes(app: FastAPI, state: GatewayState) -> None:
    def health() -> Response:
        return Response(status_code=200 if state.healthy else 503)

    @app.get("/health")
    async def get_health() -> Response:
        """200 while requests can be served, else 503."""
        return health()

    @app.post("/ping", include_in_schema=False)
    @app.get("/ping")
    async def ping() -> Response:
        """Like /health."""
        return health()

    @app.get("/version")
    async def version() -> Response:
        """The version of this server."""
        return _json({"version": build_version()})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    async def root() -> Response:
        """A sign of life."""
        return _json({"status": "ok"})


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = shorten(request.url.path)
        kind, message = SCHEMA, str(error.detail)
        if error.status_code == 404:
            kind, message = NOT_FOUND, f"The path `{path}` does not exist."
        elif error.status_code == 405:
            message = f"The method {shorten(request.method, 20)} is not allowed for `{path}`."
        return ApiError(error.status_code, kind, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return to_api_error(error).response()


def _add_layers(app: FastAPI, state: GatewayState) -> None:
    """Innermost first, so that a request passes ids, keys, CORS in this order."""
    config = state.config
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.add_middleware(ApiKeys, keys=config.api_key)
    app.add_middleware(
        RequestIds,
        metrics=state.metrics,
        handlers=[route.path for route in app.routes if hasattr(route, "path")],
        echo=config.enable_request_id_headers,
        access_log=not config.disable_access_log,
    )
