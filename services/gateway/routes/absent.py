"""Paths that other servers have and that a server of generative models cannot fill."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.responses import Response

from services.gateway.errors import NOT_FOUND, ApiError

_EMBEDDING = "The served model generates text: it makes no embeddings, scores, ranks or classes."
_AUDIO = "The served model takes and makes no sound."
_IMAGES = "The served model makes no pictures."
_REASONS = {
    "/v1/embeddings": _EMBEDDING,
    "/v1/score": _EMBEDDING,
    "/score": _EMBEDDING,
    "/v1/rerank": _EMBEDDING,
    "/v2/rerank": _EMBEDDING,
    "/rerank": _EMBEDDING,
    "/pooling": _EMBEDDING,
    "/classify": _EMBEDDING,
    "/v1/audio/speech": _AUDIO,
    "/v1/audio/transcriptions": _AUDIO,
    "/v1/audio/translations": _AUDIO,
    "/v1/realtime": _AUDIO,
    "/v1/images/generations": _IMAGES,
    "/v1/images/edits": _IMAGES,
}


def add_routes(app: FastAPI) -> None:
    """404 with the reason."""
    for path, reason in _REASONS.items():
        app.add_api_route(path, _refusal(reason), methods=["GET", "POST"], include_in_schema=False)


def _refusal(reason: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise ApiError(404, NOT_FOUND, reason)

    return refuse
