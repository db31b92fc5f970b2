"""Request of POST /v1/messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from services.gateway.schema.fields import UINT32_MAX, Flag, Int, Lenient, Number

MIN_BUDGET = 1024


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ImageOrigin(Lenient):
    """Where the bytes of an image are."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(Lenient):
    """A content block. Which fields it has follows from its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    source: ImageOrigin | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: (
        Annotated[
            list[Block],
            BeforeValidator(_as_blocks, json_schema_input_type=str | list[dict[str, Any]]),
        ]
        | None
    ) = None
    is_error: Flag | None = None


Blocks = Annotated[
    list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])
]


class AnthropicMessage(Lenient):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class AnthropicTool(Lenient):
    """A tool; those without an input schema run on the provider's servers and are left out."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: Flag | None = None


class AnthropicToolChoice(Lenient):
    """How tools may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Flag | None = None


class AnthropicThinking(Lenient):
    """The thinking switch."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = Field(
        None, ge=MIN_BUDGET, le=UINT32_MAX, description=f"an integer of at least {MIN_BUDGET}"
    )


class OutputConfig(Lenient):
    """Effort and format of the output."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class Metadata(Lenient):
    """About the client."""

    user_id: str | None = None


class CountRequest(Lenient):
    """Body of POST /v1/messages/count_tokens."""

    model: str | None = Field(None, description="the name of a served model")
    messages: list[AnthropicMessage] = Field(
        min_length=1, description="a non-empty list of messages"
    )
    system: Blocks | None = Field(None, description="a text or a list of text blocks")
    tools: list[AnthropicTool] | None = Field(None, description="a list of tools")
    tool_choice: AnthropicToolChoice | None = Field(None, description="an object with a type")
    thinking: AnthropicThinking | None = Field(None, description="an object with a type")
    output_config: OutputConfig | None = Field(None, description="an object")


class MessagesRequest(CountRequest):
    """Body of POST /v1/messages."""

    max_tokens: Int = Field(ge=1, le=UINT32_MAX, description="an integer of at least 1")
    stop_sequences: list[str] | None = Field(None, description="a list of non-empty texts")
    stream: Flag | None = Field(None, description="true or false")
    temperature: Number | None = Field(None, ge=0, le=2, description="a number from 0 to 2")
    top_p: Number | None = Field(None, gt=0, le=1, description="a number above 0 and at most 1")
    top_k: Int | None = Field(None, ge=-1, le=UINT32_MAX, description="an integer of at least -1")
    metadata: Metadata | None = Field(None, description="an object")
