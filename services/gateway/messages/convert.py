"""From a Messages request to the chat request of the same meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from services.gateway.errors import bad_request
from services.gateway.messages.schema import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountRequest,
    MessagesRequest,
)
from services.gateway.origins import ORIGIN, FieldNames

NAMES = FieldNames(
    messages="messages",
    image="source",
    fields={
        "stop": "stop_sequences",
        "user": "metadata.user_id",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
        "response_format": "output_config.format",
        "response_format.json_schema": "output_config.format",
        "response_format.json_schema.schema": "output_config.format.schema",
    },
)
# Claude Code puts a hash that changes with every request here, which would defeat prefix caches.
_BILLING = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Blocks that carry nothing for a model that runs here.
_SILENT = frozenset({"redacted_thinking", "tool_reference", "tool_addition", "tool_removal"})


def chat_fields(request: CountRequest) -> dict[str, Any]:
    """Fields of the chat request. Raises ApiError 400 naming the block at fault."""
    fields: dict[str, Any] = {"model": request.model, "messages": list(_conversation(request))}
    tools = [_tool(tool) for tool in request.tools or () if tool.input_schema is not None]
    if tools:
        fields["tools"] = tools
    if request.tool_choice is not None:
        fields |= _tool_choice(request.tool_choice, has_tools=bool(tools))
    if request.thinking is not None:
        fields["thinking"] = {"type": request.thinking.type}
        fields["thinking_token_budget"] = request.thinking.budget_tokens
    if request.output_config is not None:
        fields |= _output(request)
    if isinstance(request, MessagesRequest):
        fields |= _sampling(request)
    return {name: value for name, value in fields.items() if value is not None}


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    budget = request.thinking.budget_tokens if request.thinking else None
    if budget is not None and budget >= request.max_tokens:
        message = f"`thinking.budget_tokens` must be below `max_tokens`, got {budget}."
        raise bad_request(message, "thinking.budget_tokens")
    return {
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "user": request.metadata.user_id if request.metadata else None,
    }


def _output(request: CountRequest) -> dict[str, Any]:
    config = request.output_config
    assert config is not None
    fields: dict[str, Any] = {"reasoning_effort": config.effort}
    if config.format is not None and config.format.get("type") == "json_schema":
        schema = {"name": "output", "schema": config.format.get("schema")}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _conversation(request: CountRequest) -> Iterator[dict[str, Any]]:
    system = [
        _part(f"system.{i}", block)
        for i, block in enumerate(request.system or ())
        if not (block.text or "").startswith(_BILLING)
    ]
    if system:
        yield {"role": "system", "content": system, ORIGIN: "system"}
    for index, message in enumerate(request.messages):
        yield from _turn(f"messages.{index}", message)


def _turn(path: str, message: AnthropicMessage) -> Iterator[dict[str, Any]]:
    """A turn of the user may hold tool results, each a message of its own in front of the rest."""
    turn: dict[str, Any] = {"role": message.role, "content": [], ORIGIN: path}
    for index, block in enumerate(message.content):
        where = f"{path}.content.{index}"
        match block.type:
            case "tool_result":
                yield _result(where, block)
            case "tool_use" | "server_tool_use":
                turn.setdefault("tool_calls", []).append(_call(where, block))
            case "thinking":
                turn["reasoning"] = turn.get("reasoning", "") + (block.thinking or "")
            case kind if kind in _SILENT:
                continue
            case _:
                turn["content"].append(_part(where, block))
    if turn["content"] or len(turn) > 3:
        yield turn


def _result(path: str, block: Block) -> dict[str, Any]:
    parts = [
        _part(f"{path}.content.{i}", b)
        for i, b in enumerate(block.content or ())
        if b.type not in _SILENT
    ]
    turn = {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": parts or ""}
    return turn | {ORIGIN: path}


def _call(path: str, block: Block) -> dict[str, Any]:
    if not block.name:
        raise bad_request(f"`{path}.name` must be a non-empty text.", f"{path}.name")
    arguments = orjson.dumps(block.input or {}).decode()
    return {"id": block.id or "", "function": {"name": block.name, "arguments": arguments}}


def _part(path: str, block: Block) -> dict[str, Any]:
    if block.type == "text" and block.text is not None:
        return {"type": "text", "text": block.text, ORIGIN: path}
    if block.type == "image" and block.source is not None:
        image = {"url": _image_url(path, block)}
        return {"type": "image_url", "image_url": image, ORIGIN: path}
    if block.type in ("text", "image"):
        field = "text" if block.type == "text" else "source"
        raise bad_request(f"`{path}.{field}` is required.", f"{path}.{field}")
    raise bad_request(f"`{path}.type` {block.type[:40]!r} is not supported.", f"{path}.type")


def _image_url(path: str, block: Block) -> str:
    source = block.source
    assert source is not None
    if source.type == "url" and source.url:
        return source.url
    if source.type == "base64" and source.data:
        return f"data:{source.media_type or 'image/png'};base64,{source.data}"
    raise bad_request(f"`{path}.source` holds no image.", f"{path}.source")


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: AnthropicToolChoice, *, has_tools: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if choice.type == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name or ""}}
    elif has_tools or choice.type == "any":
        fields["tool_choice"] = _CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields
