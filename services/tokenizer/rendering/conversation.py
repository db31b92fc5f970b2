"""Requests as the conversation that chat templates take. What is malformed is refused here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from warhorse.v1 import common_pb2, tokenizer_pb2

from services.common.errors import ServiceError

ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_ECHO = 64


@dataclass(frozen=True, slots=True)
class PastCall:
    """A tool call of the history; `arguments` is the client's JSON text, perhaps broken."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `parts` are its texts."""

    role: str
    parts: tuple[str, ...] = ()
    reasoning: str = ""
    calls: tuple[PastCall, ...] = ()
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """All that a template sees, before any family's rules."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    effort: str | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def refuse(message: str, field_name: str) -> ServiceError:
    """Return the error of a malformed field."""
    return ServiceError(common_pb2.ERROR_REASON_INVALID_FIELD, message, field=field_name)


def from_request(request: tokenizer_pb2.RenderRequest) -> Conversation:
    """Return the conversation of a request. Raises ServiceError naming the field."""
    messages = tuple(_message(m, f"messages[{i}]") for i, m in enumerate(request.messages))
    if not messages:
        raise refuse("messages must hold at least one message", "messages")
    conversation = Conversation(
        messages,
        tools=_shown_tools(request),
        arguments=_template_arguments(request.template_kwargs_json),
        effort=request.reasoning_effort if request.HasField("reasoning_effort") else None,
        enable_thinking=(request.enable_thinking if request.HasField("enable_thinking") else None),
        add_generation_prompt=_adds_prompt(request),
        continue_final_message=request.continue_final_message,
    )
    _check_continuation(conversation)
    return conversation


def _adds_prompt(request: tokenizer_pb2.RenderRequest) -> bool:
    if not request.continue_final_message:
        given = request.HasField("add_generation_prompt")
        return request.add_generation_prompt if given else True
    if request.HasField("add_generation_prompt") and request.add_generation_prompt:
        raise refuse(
            "add_generation_prompt and continue_final_message must not both be true",
            "add_generation_prompt",
        )
    return False


def _check_continuation(conversation: Conversation) -> None:
    last = conversation.messages[-1]
    if conversation.continue_final_message and (last.role != "assistant" or last.calls):
        raise refuse(
            "continue_final_message needs an assistant message without tool calls at the end",
            "continue_final_message",
        )


def _message(message: tokenizer_pb2.ChatMessage, where: str) -> Message:
    if message.role not in ROLES:
        raise refuse(
            f"role must be one of {', '.join(ROLES)}; got {message.role[:_MAX_ECHO]!r}",
            f"{where}.role",
        )
    for index, part in enumerate(message.content):
        if part.WhichOneof("part") == "image_url":
            raise ServiceError(
                common_pb2.ERROR_REASON_UNSUPPORTED,
                "this model takes no images",
                field=f"{where}.content[{index}]",
            )
    calls = tuple(PastCall(c.id, c.name, c.arguments) for c in message.tool_calls)
    if calls and message.role != "assistant":
        raise refuse("only assistant messages have tool calls", f"{where}.tool_calls")
    return Message(
        message.role,
        tuple(part.text for part in message.content),
        message.reasoning,
        calls,
        message.tool_call_id,
        message.name,
    )


def _shown_tools(request: tokenizer_pb2.RenderRequest) -> tuple[dict[str, Any], ...]:
    if request.tool_choice == tokenizer_pb2.TOOL_CHOICE_NONE:
        return ()
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools))


def _tool(tool: tokenizer_pb2.Tool, where: str) -> dict[str, Any]:
    """Return a tool as OpenAI writes it, keys in the usual order."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters_json"):
        function["parameters"] = json_object(tool.parameters_json, f"{where}.parameters_json")
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _template_arguments(text: str) -> dict[str, Any]:
    return json_object(text, "template_kwargs_json") if text else {}


def json_object(text: str, field_name: str) -> dict[str, Any]:
    """Return the object of a JSON text. Raises ServiceError naming the field."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "not valid JSON"
        raise refuse(f"{field_name} is {reason}", field_name) from error
    if not isinstance(value, dict):
        raise refuse(f"{field_name} must be a JSON object", field_name)
    return value
