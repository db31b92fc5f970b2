"""From a valid chat request to the tokenizer's RenderRequest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from warhorse.v1 import tokenizer_pb2

from services.gateway.errors import bad_request, unsupported
from services.gateway.schema.chat import (
    ChatRequest,
    ContentPart,
    Message,
    NamedToolChoice,
    ToolDefinition,
)

_EFFORT_ALIASES = {"ultra": "max"}


def render_request(
    request: ChatRequest, default_kwargs: Mapping[str, Any], *, trust_template: bool
) -> tokenizer_pb2.RenderRequest:
    """The conversation with its tools and template arguments. Raises ApiError 400."""
    if request.chat_template is not None and not trust_template:
        raise bad_request("`chat_template` in requests is switched off.", "chat_template")
    kwargs = {**default_kwargs, **(request.chat_template_kwargs or {})}
    rendering = tokenizer_pb2.RenderRequest(
        messages=[_message(i, m) for i, m in enumerate(request.messages)],
        tools=tool_messages(request),
        tool_choice=tool_choice(request),
        tool_name=tool_name(request),
        continue_final_message=bool(request.continue_final_message),
        chat_template=request.chat_template or "",
        task=request.task or "",
        response_format_json=_response_format(request),
    )
    rendering.add_generation_prompt = _generation_prompt(request)
    _set_thinking(request, kwargs, rendering)
    if kwargs:
        rendering.template_kwargs_json = _json_text(kwargs, "chat_template_kwargs")
    return rendering


def _response_format(request: ChatRequest) -> str:
    """For prompt formats that tell the model what its answer must look like; "" for free text."""
    wanted = request.response_format
    if wanted is None or wanted.type not in ("json_object", "json_schema"):
        return ""
    return _json_text(wanted.model_dump(by_alias=True, exclude_none=True), "response_format")


def tool_choice(request: ChatRequest) -> tokenizer_pb2.ToolChoice:
    """How tools may be called. Raises ApiError 400 for a tool that is not declared."""
    choice = request.tool_choice
    if choice not in (None, "none") and request.tools is None:
        raise bad_request("`tool_choice` needs `tools`.", "tool_choice")
    if isinstance(choice, NamedToolChoice):
        names = [tool.function.name for tool in request.tools or ()]
        if choice.function.name not in names:
            message = f"`tool_choice` names {choice.function.name!r}, which is not in `tools`."
            raise bad_request(message, "tool_choice")
    if isinstance(choice, NamedToolChoice):
        return tokenizer_pb2.TOOL_CHOICE_NAMED
    if choice == "required":
        return tokenizer_pb2.TOOL_CHOICE_REQUIRED
    if choice == "none" or not request.tools:
        return tokenizer_pb2.TOOL_CHOICE_NONE
    return tokenizer_pb2.TOOL_CHOICE_AUTO


def tool_name(request: ChatRequest) -> str:
    """The tool that a named choice names; "" for the other choices."""
    choice = request.tool_choice
    return choice.function.name if isinstance(choice, NamedToolChoice) else ""


def tool_messages(request: ChatRequest) -> list[tokenizer_pb2.Tool]:
    """The declared tools."""
    return [_tool(f"tools.{i}.function", tool) for i, tool in enumerate(request.tools or ())]


def text_bytes(request: ChatRequest) -> int:
    """A lower bound of the prompt's size in bytes: the characters of all message texts."""
    return sum(
        len(part.plain or "") for message in request.messages for part in message.content or ()
    )


def _tool(path: str, tool: ToolDefinition) -> tokenizer_pb2.Tool:
    function = tool.function
    result = tokenizer_pb2.Tool(name=function.name)
    if function.description is not None:
        result.description = function.description
    if function.parameters is not None:
        result.parameters_json = _json_text(function.parameters, f"{path}.parameters")
    if function.strict is not None:
        result.strict = function.strict
    return result


def _json_text(value: Mapping[str, Any], param: str) -> str:
    """`value` as JSON. The reader of bodies allows deeper nesting than the writer does."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        raise bad_request(f"`{param}` is nested too deeply.", param) from None


def _message(index: int, message: Message) -> tokenizer_pb2.ChatMessage:
    path = f"messages.{index}"
    if message.content is None and message.role != "assistant":
        raise bad_request(f"`{path}.content` is required.", f"{path}.content")
    return tokenizer_pb2.ChatMessage(
        role=message.role,
        content=[
            _part(f"{path}.content.{i}", part) for i, part in enumerate(message.content or ())
        ],
        reasoning=message.reasoning or message.reasoning_content or "",
        tool_calls=[
            tokenizer_pb2.ToolCall(
                id=call.id or "",
                name=call.function.name,
                arguments=call.function.arguments or "",
            )
            for call in message.tool_calls or ()
        ],
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def refuse_images(request: ChatRequest) -> None:
    """Raise ApiError 400 for the first image; for models without vision."""
    for i, message in enumerate(request.messages):
        for j, part in enumerate(message.content or ()):
            if part.is_image:
                path = f"messages.{i}.content.{j}"
                raise unsupported("A message part with an image", path)


def _part(path: str, part: ContentPart) -> tokenizer_pb2.ContentPart:
    if part.is_image:
        return _image(path, part)
    if part.plain is None:
        raise bad_request(f"`{path}.text` is required.", f"{path}.text")
    return tokenizer_pb2.ContentPart(text=part.plain)


def _image(path: str, part: ContentPart) -> tokenizer_pb2.ContentPart:
    image = part.image_url
    if image is None:
        raise bad_request(f"`{path}.image_url` is required.", f"{path}.image_url")
    detail = image.detail or part.detail or ""
    return tokenizer_pb2.ContentPart(image_url=image.url, image_detail=detail)


def _generation_prompt(request: ChatRequest) -> bool:
    if request.continue_final_message:
        if request.add_generation_prompt:
            message = "`add_generation_prompt` and `continue_final_message` cannot both be true."
            raise bad_request(message, "continue_final_message")
        return False
    return request.add_generation_prompt is not False


def _set_thinking(
    request: ChatRequest, kwargs: dict[str, Any], rendering: tokenizer_pb2.RenderRequest
) -> None:
    """Fold the ways to ask for thinking into two fields; takes them out of `kwargs`."""
    effort = _effort(request, kwargs.pop("reasoning_effort", None))
    if effort is not None:
        rendering.reasoning_effort = _EFFORT_ALIASES.get(effort, effort)
    thinking = kwargs.pop("enable_thinking", None)
    if thinking is None:
        thinking = _thinking(request, effort)
    if thinking is not None:
        rendering.enable_thinking = bool(thinking)


def _effort(request: ChatRequest, from_kwargs: Any) -> str | None:
    nested = request.reasoning.effort if request.reasoning else None
    for value in (request.reasoning_effort, nested, from_kwargs):
        if value is not None:
            return str(value)
    return None


def _thinking(request: ChatRequest, effort: str | None) -> bool | None:
    if request.thinking is not None and request.thinking.type != "adaptive":
        return request.thinking.type == "enabled"
    if request.reasoning is not None and request.reasoning.enabled is not None:
        return request.reasoning.enabled
    return None if effort is None else effort != "none"
