"""Request of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import orjson
from pydantic import BeforeValidator, Field

from services.gateway.schema.fields import UINT32_MAX, Flag, Int, Lenient, wrong
from services.gateway.schema.sampling import SamplingRequest

EffortName = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]
EFFORTS: tuple[str, ...] = get_args(EffortName)
_IMAGE_PARTS = ("image_url", "input_image")
Detail = Literal["auto", "low", "high"]


def _as_image_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class ImageUrl(Lenient):
    """Where a picture is, and how closely the model shall look."""

    url: str = Field(min_length=1, description="a non-empty text")
    detail: Detail | None = Field(None, description='"auto", "low" or "high"')


class ContentPart(Lenient):
    """A piece of a message. Text parts carry `text`, a refusal `refusal`, a picture `image_url`.

    `detail` of an `input_image` stands beside its URL.
    """

    type: Literal["text", "input_text", "refusal", "image_url", "input_image"]
    text: str | None = None
    refusal: str | None = None
    image_url: (
        Annotated[ImageUrl, BeforeValidator(_as_image_url, json_schema_input_type=str | ImageUrl)]
        | None
    ) = None
    detail: Detail | None = Field(None, description='"auto", "low" or "high"')

    @property
    def is_image(self) -> bool:
        """Whether this is a picture."""
        return self.type in _IMAGE_PARTS

    @property
    def plain(self) -> str | None:
        """The text, None when the part has none."""
        return self.refusal if self.type == "refusal" else self.text


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[
    list[ContentPart],
    BeforeValidator(_as_parts, json_schema_input_type=str | list[ContentPart]),
]


def _as_json_text(value: Any) -> Any:
    """History may hold arguments as an object; the renderer takes JSON text."""
    if not isinstance(value, dict):
        return value
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        raise ValueError("nested too deeply") from None


JsonText = Annotated[
    str, BeforeValidator(_as_json_text, json_schema_input_type=str | dict[str, Any])
]


class FunctionCall(Lenient):
    """Name and arguments of a call in a history; the arguments need not be valid JSON."""

    name: str = Field(min_length=1, description="a non-empty text")
    arguments: JsonText | None = None


class ToolCallMessage(Lenient):
    """A call that the assistant made earlier."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(Lenient):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: Parts | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionDefinition(Lenient):
    """What a tool is called and which arguments it takes (JSON schema)."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class ToolDefinition(Lenient):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ToolChoiceFunction(Lenient):
    """The name inside a named tool choice."""

    name: str = Field(min_length=1)


class NamedToolChoice(Lenient):
    """`{"type": "function", "function": {"name": ...}}`."""

    type: Literal["function"] = "function"
    function: ToolChoiceFunction


def _tool_choice(value: Any) -> Any:
    if value is None or value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict):
        return NamedToolChoice.model_validate(value)
    raise wrong('"none", "auto", "required" or an object that names a function')


ToolChoice = Annotated[
    Any,
    BeforeValidator(
        _tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | NamedToolChoice | None,
    ),
]


def _effort(value: Any) -> Any:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    if isinstance(value, str) and value.lower() in EFFORTS:
        return value.lower()
    raise wrong("one of " + ", ".join(EFFORTS) + ", or an integer of at least 0")


Effort = Annotated[
    str | int | None,
    BeforeValidator(
        _effort, json_schema_input_type=EffortName | Annotated[int, Field(ge=0)] | None
    ),
]


class Thinking(Lenient):
    """Switches thinking as the DeepSeek and Anthropic interfaces do."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description='"enabled", "disabled" or "adaptive"'
    )


class ReasoningOptions(Lenient):
    """Switches thinking as OpenRouter and SGLang do."""

    effort: Effort = None
    enabled: Flag | None = None


class ChatRequest(SamplingRequest):
    """Body of a chat completion."""

    messages: list[Message] = Field(min_length=1, description="a non-empty list of messages")
    max_completion_tokens: Int | None = Field(
        None, ge=1, le=UINT32_MAX, description="an integer of at least 1"
    )
    max_tokens: Int | None = Field(
        None, ge=1, le=UINT32_MAX, description="an integer of at least 1"
    )
    logprobs: Flag | None = Field(None, description="true or false")
    top_logprobs: Int | None = Field(None, ge=-1, description="an integer of at least -1")
    tools: list[ToolDefinition] | None = Field(None, description="a list of tools")
    tool_choice: ToolChoice = Field(
        None, description='"none", "auto", "required" or an object that names a function'
    )
    parallel_tool_calls: Flag | None = Field(None, description="true or false")
    reasoning_effort: Effort = Field(
        None, description="one of " + ", ".join(EFFORTS) + ", or an integer of at least 0"
    )
    thinking: Thinking | None = Field(None, description="an object with a type")
    reasoning: ReasoningOptions | None = Field(None, description="an object")
    thinking_token_budget: Int | None = Field(
        None, ge=-1, le=UINT32_MAX, description="an integer of at least 0, or -1 for no limit"
    )
    task: str | None = Field(None, description="the name of a quick instruction")
    echo: Flag | None = Field(None, description="true or false")
    include_reasoning: Flag | None = Field(None, description="true or false")
    separate_reasoning: Flag | None = Field(None, description="true or false")
    stream_reasoning: Flag | None = Field(None, description="true or false")
    chat_template: str | None = Field(None, description="a text")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="an object")
    add_generation_prompt: Flag | None = Field(None, description="true or false")
    continue_final_message: Flag | None = Field(None, description="true or false")
    return_prompt_text: Flag | None = Field(None, description="true or false")

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)
