"""Requests as the conversation that chat templates take. What is malformed is refused here.

Images. A message's `parts` are texts (`str`) and `ImagePart`s in the client's order. Whatever
renders a conversation shows an image in one of two ways:

* A chat template (Jinja) gets `{"type": "image"}` in the content list and writes the checkpoint's
  image token. Afterwards the k-th of these tokens stands for the k-th image of the prepared
  conversation (`Conversation.images()`), so what a template reorders or drops must be reordered or
  dropped by `FamilyRules.prepare` first.
* A renderer in Python puts the `ImagePart` itself between the segments of its prompt:
  `Prompt((Segment("<|User|>", True), image_part, Segment("text", False)))`. An image that is left
  out is not even read. No placeholder and no framing tokens: the image's layout (`images.rules`)
  gives all tokens that stand for it.

Sizes, token counts and pixels come later and are no concern of a renderer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from warhorse.v1 import common_pb2, tokenizer_pb2

from services.common.errors import ServiceError

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
DETAILS = ("auto", "low", "high")
_MAX_ECHO = 64


@dataclass(frozen=True, slots=True)
class PastCall:
    """A tool call of the history; `arguments` is the client's JSON text, perhaps broken."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image as the client gave it: a data or http(s) URL that nobody has looked at yet.

    detail: "low", "high" or "auto". where: the field that errors name, for example
    `messages.1.content.0.image_url`.
    """

    url: str
    detail: str
    where: str


Part = str | ImagePart


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `parts` are its texts and images."""

    role: str
    parts: tuple[Part, ...] = ()
    reasoning: str = ""
    calls: tuple[PastCall, ...] = ()
    call_id: str = ""
    name: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The parts that are text."""
        return tuple(part for part in self.parts if isinstance(part, str))

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """The parts that are images."""
        return tuple(part for part in self.parts if isinstance(part, ImagePart))


@dataclass(frozen=True, slots=True)
class Conversation:
    """All that a template sees, before any family's rules.

    response_format: OpenAI's object, None for free text. task: a quick instruction, or empty.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    effort: str | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    response_format: dict[str, Any] | None = None
    task: str = ""

    def images(self) -> tuple[ImagePart, ...]:
        """All images in the order of messages and parts."""
        return tuple(image for message in self.messages for image in message.images)


def refuse(message: str, field_name: str) -> ServiceError:
    """Return the error of a malformed field."""
    return ServiceError(common_pb2.ERROR_REASON_INVALID_FIELD, message, field=field_name)


def from_request(request: tokenizer_pb2.RenderRequest) -> Conversation:
    """Return the conversation of a request. Raises ServiceError naming the field."""
    messages = tuple(_message(m, i) for i, m in enumerate(request.messages))
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
        response_format=_response_format(request.response_format_json),
        task=request.task,
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


def _message(message: tokenizer_pb2.ChatMessage, index: int) -> Message:
    where = f"messages[{index}]"
    if message.role not in ROLES:
        raise refuse(
            f"role must be one of {', '.join(ROLES)}; got {message.role[:_MAX_ECHO]!r}",
            f"{where}.role",
        )
    calls = tuple(PastCall(c.id, c.name, c.arguments) for c in message.tool_calls)
    if calls and message.role != "assistant":
        raise refuse("only assistant messages have tool calls", f"{where}.tool_calls")
    return Message(
        message.role,
        tuple(_part(part, index, i) for i, part in enumerate(message.content)),
        message.reasoning,
        calls,
        message.tool_call_id,
        message.name,
    )


def _part(part: tokenizer_pb2.ContentPart, message: int, index: int) -> Part:
    if part.WhichOneof("part") != "image_url":
        return part.text
    where = f"messages.{message}.content.{index}.image_url"
    detail = part.image_detail or "auto"
    if detail not in DETAILS:
        raise refuse(
            f"detail must be one of {', '.join(DETAILS)}; got {detail[:_MAX_ECHO]!r}",
            f"{where}.detail",
        )
    return ImagePart(part.image_url, detail, where)


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


def _response_format(text: str) -> dict[str, Any] | None:
    form = json_object(text, "response_format_json") if text else {}
    kind = form.get("type", "text")
    if kind not in ("text", "json_object", "json_schema"):
        raise refuse(
            f"type must be text, json_object or json_schema; got {str(kind)[:_MAX_ECHO]!r}",
            "response_format",
        )
    return None if kind == "text" else form


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
