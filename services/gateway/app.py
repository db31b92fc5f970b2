"""The HTTP application: routes, error handlers, layers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from services.common.describe import build_version
from services.common.errors import ServiceError
from services.gateway.config import GatewayConfig
from services.gateway.document import describe
from services.gateway.errors import NOT_FOUND, SCHEMA, ApiError, shorten, to_api_error
from services.gateway.messages.errors import error_response
from services.gateway.middleware import ApiKeys, RequestIds
from services.gateway.routes import (
    absent,
    control,
    diagnosis,
    generation,
    models,
    responses,
    status,
    tokens,
)
from services.gateway.state import GatewayState


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
    generation.add_routes(app, state)
    responses.add_routes(app, state)
    models.add_routes(app, state)
    tokens.add_routes(app, state)
    status.add_routes(app, state)
    control.add_routes(app, state)
    diagnosis.add_routes(app, state)
    absent.add_routes(app)
    describe(app, has_keys=bool(config.api_key))
    _add_error_handlers(app)
    _add_layers(app, state)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(error, request.url.path)

    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> Response:
        return error_response(to_api_error(error), request.url.path)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = shorten(request.url.path)
        kind, message = SCHEMA, str(error.detail)
        if error.status_code == 404:
            kind, message = NOT_FOUND, f"The path `{path}` does not exist."
        elif error.status_code == 405:
            message = f"The method {shorten(request.method, 20)} is not allowed for `{path}`."
        found = ApiError(error.status_code, kind, message, headers=error.headers)
        return error_response(found, request.url.path)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return error_response(to_api_error(error), request.url.path)


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
        tracer=state.tracer,
    )
