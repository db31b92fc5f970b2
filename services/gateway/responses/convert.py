"""From a Responses request to the chat request of the same meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from services.gateway.errors import bad_request, shorten
from services.gateway.origins import ORIGIN, FieldNames
from services.gateway.responses.schema import ResponsesRequest
from services.gateway.responses.tools import ToolNames, chat_tool_choice

Message = dict[str, Any]
NAMES = FieldNames(
    messages="input",
    image="image_url",
    fields={
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "response_format.json_schema.schema": "text.format.schema",
        "response_format.type": "text.format.type",
    },
)
_PASSED = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "stop", "priority", "cache_salt", "user",
    "chat_template_kwargs", "parallel_tool_calls", "logit_bias", "ignore_eos", "min_tokens",
    "stop_token_ids", "include_stop_str_in_output", "allowed_token_ids", "bad_words",
    "truncate_prompt_tokens", "truncation_side", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "guided_json_object", "structural_tag",
    "regex", "ebnf", "json_schema",
)  # fmt: skip


def chat_fields(
    request: ResponsesRequest, names: ToolNames, history: Sequence[Message]
) -> dict[str, Any]:
    """Fields of the chat request. `history` is the conversation of a stored response."""
    messages = [*history, *conversation(request.input)]
    if request.instructions:
        first = {"role": "system", "content": request.instructions, ORIGIN: "instructions"}
        messages = [first, *messages]
    fields: dict[str, Any] = {name: getattr(request, name) for name in _PASSED}
    fields |= {
        "messages": messages,
        "tools": names.functions or None,
        "tool_choice": chat_tool_choice(request.tool_choice, names),
        "max_completion_tokens": request.max_output_tokens,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "response_format": _format(request),
    }
    return {name: value for name, value in fields.items() if value is not None}


def conversation(items: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Items as messages: reasoning, text and calls of one turn become one message.

    Messages and parts hold their paths as origins.
    """
    turns = _Turns()
    for index, item in enumerate(items):
        turns.add(f"input.{index}", item)
    return turns.messages


class _Turns:
    """Collects messages; the last one is open while it is the assistant's."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add(self, path: str, item: Mapping[str, Any]) -> None:
        """Take one item. Raises ApiError 400 naming it."""
        match item.get("type", "message"):
            case "message":
                self._message(path, item)
            case "reasoning":
                turn = self._assistant(path)
                turn["reasoning"] = turn.get("reasoning", "") + _reasoning(path, item)
            case "function_call":
                self._call(path, item, _text_of(item.get("arguments")))
            case "custom_tool_call":
                given = {"input": _text_of(item.get("input"))}
                self._call(path, item, orjson.dumps(given).decode())
            case "function_call_output" | "custom_tool_call_output":
                content = _content(f"{path}.output", item.get("output") or "")
                call_id = str(item.get("call_id") or "")
                turn = {"role": "tool", "tool_call_id": call_id, "content": content}
                self.messages.append(turn | {ORIGIN: path})
            case "item_reference":
                message = f"`{path}` refers to an item, and items are not stored one by one."
                raise bad_request(message, path)
            case _:
                return  # calls of hosted tools and the like mean nothing to the model

    def _message(self, path: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            message = f"`{path}.role` must be system, developer, user or assistant."
            raise bad_request(message, f"{path}.role")
        content = _content(f"{path}.content", item.get("content") or "")
        fresh = {"role": role, ORIGIN: path}
        turn = self._assistant(path) if role == "assistant" else fresh
        if turn.get("content"):
            turn = fresh
        turn["content"] = content
        if not self.messages or self.messages[-1] is not turn:
            self.messages.append(turn)

    def _call(self, path: str, item: Mapping[str, Any], arguments: str) -> None:
        name = item.get("name")
        if not isinstance(name, str) or not name:
            raise bad_request(f"`{path}.name` must be a non-empty text.", f"{path}.name")
        space = item.get("namespace")
        full = f"{space}__{name}" if isinstance(space, str) and space else name
        call = {"id": str(item.get("call_id") or ""), "type": "function"}
        function = {"name": full, "arguments": arguments}
        self._assistant(path).setdefault("tool_calls", []).append(call | {"function": function})

    def _assistant(self, path: str) -> Message:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", ORIGIN: path})
        return self.messages[-1]


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value or {}).decode()


def _reasoning(path: str, item: Mapping[str, Any]) -> str:
    name = "content" if item.get("content") else "summary"
    parts = item.get(name) or []
    if not isinstance(parts, list):
        raise bad_request(f"`{path}.{name}` must be a list of parts.", f"{path}.{name}")
    return "".join(str(p.get("text") or "") for p in parts if isinstance(p, dict))


def _content(path: str, value: Any) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad_request(f"`{path}` must be a text or a list of parts.", path)
    parts = ((f"{path}.{i}", part) for i, part in enumerate(value))
    return [_part(where, part) | {ORIGIN: where} for where, part in parts]


def _part(path: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": str(part.get("text") or "")}
    if kind == "refusal":
        return {"type": "refusal", "refusal": str(part.get("refusal") or "")}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        image = {"url": part["image_url"], "detail": part.get("detail") or "auto"}
        return {"type": "image_url", "image_url": image}
    raise bad_request(f"`{path}.type` {shorten(kind, 40)} is not supported.", f"{path}.type")


def _format(request: ResponsesRequest) -> dict[str, Any] | None:
    form = request.text.format if request.text else None
    if form is None or form.get("type") in (None, "text"):
        return None
    if form.get("type") == "json_schema":
        keys = ("name", "schema", "strict", "description")
        inner = {key: form[key] for key in keys if form.get(key) is not None}
        return {"type": "json_schema", "json_schema": inner}
    return form
