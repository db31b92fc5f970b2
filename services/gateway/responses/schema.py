"""Request of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from services.gateway.schema.fields import UINT32_MAX, Flag, Int, Lenient, wrong
from services.gateway.schema.sampling import SamplingRequest

_INPUT = "a text or a non-empty list of items"


def _items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        raise wrong(_INPUT)
    return value


_List = Annotated[list[dict[str, Any]], Field(min_length=1)]
Items = Annotated[list[dict[str, Any]], BeforeValidator(_items, json_schema_input_type=str | _List)]


class ReasoningConfig(Lenient):
    """How much to think, and how it is shown."""

    effort: str | int | None = None
    summary: str | None = None


class TextConfig(Lenient):
    """Format of the answer."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(SamplingRequest):
    """Body of a response. Items stay plain objects: their kinds are open-ended."""

    input: Items = Field(description=_INPUT)
    instructions: str | None = Field(None, description="a text")
    tools: list[dict[str, Any]] | None = Field(None, description="a list of tools")
    tool_choice: Any = Field(None, description="a text or an object")
    parallel_tool_calls: Flag | None = Field(None, description="true or false")
    reasoning: ReasoningConfig | None = Field(None, description="an object")
    text: TextConfig | None = Field(None, description="an object")
    max_output_tokens: Int | None = Field(
        None, ge=1, le=UINT32_MAX, description="an integer of at least 1"
    )
    include: list[str] | None = Field(None, description="a list of texts")
    store: Flag | None = Field(None, description="true or false")
    background: Flag | None = Field(None, description="true or false")
    previous_response_id: str | None = Field(None, description="the id of a stored response")
    metadata: dict[str, str] | None = Field(None, description="an object of texts")
    truncation: str | None = Field(None, description="a text")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="an object")
