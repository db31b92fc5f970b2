"""Model cards."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.responses import Response

from services.gateway.cards import cards
from services.gateway.errors import NOT_FOUND, ApiError, shorten
from services.gateway.routes.helpers import json_response
from services.gateway.state import GatewayState


def add_routes(app: FastAPI, state: GatewayState) -> None:
    """The served models."""
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> Response:
        """The served models."""
        return json_response({"object": "list", "data": cards(state, created)})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """One served model."""
        for card in cards(state, created):
            if card["id"] == model_id:
                return json_response(card)
        message = f"The model `{shorten(model_id)}` does not exist."
        raise ApiError(404, NOT_FOUND, message, param="model")
