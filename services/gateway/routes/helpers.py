"""What the endpoints share."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from services.common.logs import request_id_var
from services.gateway.body import MEBIBYTE, read_json
from services.gateway.document import COMPONENT
from services.gateway.identity import request_id
from services.gateway.state import GatewayState


def json_response(value: Any) -> Response:
    """200 with a JSON body."""
    return Response(orjson.dumps(value), media_type="application/json")


def body_schema(*models: type[BaseModel]) -> dict[str, Any]:
    """The part of the OpenAPI document that describes a body of one of `models`."""
    schemas = [model.model_json_schema(ref_template=COMPONENT) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


async def body_of(request: Request, state: GatewayState) -> dict[str, Any]:
    """The JSON object of a request's body. Raises ApiError 400 or 413."""
    return await read_json(request, state.config.max_body_mb * MEBIBYTE)


def identify(request: Request, from_body: str | None) -> str:
    """Id of a request: its header's, its body's, or a fresh one."""
    found = request_id(request.scope["client_request_id"], from_body or request.scope["request_id"])
    request_id_var.set(found)  # log lines and calls from here on
    return found
