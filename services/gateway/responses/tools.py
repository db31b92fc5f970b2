"""Tools of the Responses interface as functions of a chat request, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from services.gateway.errors import bad_request

_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


@dataclass(frozen=True, slots=True)
class ToolNames:
    """What became of the declared tools.

    `functions` are those of the chat request; `custom` names the ones that take one plain text;
    `namespaces` has the namespace and the own name of flattened names.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    custom: frozenset[str] = frozenset()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Iterable[Mapping[str, Any]]) -> ToolNames:
        """Flatten namespaces, turn custom tools into functions, leave hosted tools out."""
        functions, custom, namespaces = [], set(), {}
        for path, tool, space in _flat(tools):
            name = tool.get("name")
            if not isinstance(name, str) or not name:
                raise bad_request(f"`{path}.name` must be a non-empty text.", f"{path}.name")
            full = f"{space}__{name}" if space else name
            if space:
                namespaces[full] = (space, name)
            if tool.get("type") == "custom":
                custom.add(full)
            functions.append({"type": "function", "function": _function(tool, full)})
        return cls(functions, frozenset(custom), namespaces)

    def item(self, name: str, call_id: str, item_id: str, arguments: str) -> dict[str, Any]:
        """A call of the model as an output item."""
        space, own = self.namespaces.get(name, ("", name))
        item: dict[str, Any] = {"id": item_id, "call_id": call_id, "name": own}
        if space:
            item["namespace"] = space
        if name in self.custom:
            return item | {"type": "custom_tool_call", "input": plain_input(arguments)}
        return item | {"type": "function_call", "arguments": arguments}


def plain_input(arguments: str) -> str:
    """The text inside the arguments of a custom tool; the arguments where there is none."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def chat_tool_choice(choice: Any, names: ToolNames) -> Any:
    """The chat request's `tool_choice`. Raises ApiError 400 for a form that is not known."""
    if choice is None or isinstance(choice, str):
        return choice if names.functions or choice in (None, "required") else None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name") or ""}}
    if kind == "allowed_tools":
        return choice.get("mode", "auto")
    raise bad_request("`tool_choice` must be a text or an object with a known type.", "tool_choice")


def _flat(tools: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """(path, tool, namespace) of every tool that runs at the client."""
    for index, tool in enumerate(tools):
        path = f"tools.{index}"
        if tool.get("type") in ("function", "custom"):
            yield path, tool, ""
        elif tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
            for inner, one in enumerate(tool["tools"]):
                where = f"{path}.tools.{inner}"
                if not isinstance(one, dict):
                    raise bad_request(f"`{where}` must be an object.", where)
                yield where, one, str(tool.get("name") or "")


def _function(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if tool.get("type") == "custom":
        function["parameters"] = _CUSTOM_PARAMETERS
        return function
    for key in ("parameters", "strict"):
        if tool.get(key) is not None:
            function[key] = tool[key]
    return function
