"""From the forms of a Grammar message to xgrammar's structural tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from services.engine.grammar.errors import GrammarError
from services.engine.grammar.finite import check_end
from services.engine.grammar.schema import Schema

MAX_TEXT = 256 << 10
MAX_WHITESPACE = 32
JSON_FORMS = ("json_schema", "json_object")
# Newlines that a model puts between its reasoning and its answer; parsers drop them.
_GAP = {"type": "regex", "pattern": "\\n{0,2}"}
MAX_GAP = "\n\n"
# Tool-call parser of the served model -> xgrammar's name of its markup.
MARKUPS: Mapping[str, str] = {
    "qwen3_xml": "qwen_3_coder",
    "qwen3_coder": "qwen_3_coder",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v4_1",
    "glm45": "glm_4_7",
    "glm47": "glm_4_7",
}


def structural_tag(form: str, value: Any, *, gap: bool) -> dict[str, Any]:
    """The structural tag of one form. `gap`: reasoning comes in front of it.

    Raises GrammarError for JSON text that is none.
    """
    inner = _format(form, value)
    found = {"type": "sequence", "elements": [_GAP, inner]} if gap else inner
    return {"type": "structural_tag", "format": found}


def _format(form: str, value: Any) -> dict[str, Any]:
    match form:
        case "json_schema":
            return _schema(parse(value, "the schema"))
        case "json_object":
            return _schema({"type": "object"})
        case "regex":
            return {"type": "regex", "pattern": value}
        case "ebnf":
            return {"type": "grammar", "grammar": value}
        case "structural_tag":
            return _tag_format(value)
        case "tool_calls":
            return _tool_calls(value)
        case _:
            raise GrammarError(f"the form {form!r} is not known")


def _schema(schema: Any) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": schema,
        "style": "json",
        "max_whitespace_cnt": MAX_WHITESPACE,
    }


def _tag_format(text: str) -> dict[str, Any]:
    tag = parse(text, "the structural tag")
    found = tag.get("format") if isinstance(tag, dict) else None
    if not isinstance(found, dict):
        raise GrammarError("the structural tag has no object `format`")
    return found


def parse(text: str, what: str) -> Any:
    """JSON text as a value. Raises GrammarError, for text that is nested too deeply too."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{what} is not JSON: {error}"[:200]) from None


def _tool_calls(value: Mapping[str, Any]) -> dict[str, Any]:
    import xgrammar

    markup = MARKUPS.get(value["parser"])
    if markup is None:
        known = ", ".join(MARKUPS)
        raise GrammarError(f"tool-call parser {value['parser']!r} has no grammar; known: {known}")
    name = value["tool_name"]
    choice = {"type": "function", "function": {"name": name}} if name else value["choice"]
    tag = xgrammar.get_model_structural_tag(
        markup,
        tools=[_tool(tool) for tool in value["tools"]],
        tool_choice=choice,
        reasoning="disabled",
        parallel_tool_calls=value["parallel"],
    )
    found: dict[str, Any] = json.loads(tag.model_dump_json())["format"]
    return found


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _parameters(tool["parameters"], f"the schema of tool {tool['name']}")
    function = {"name": tool["name"], "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


def _parameters(text: str, what: str) -> Any:
    parameters = parse(text, what)
    if not isinstance(parameters, dict):
        raise GrammarError(f"{what} is not an object")
    try:
        check_end(Schema(parameters))
    except GrammarError as error:
        raise GrammarError(f"{what}: {error}") from None
    return parameters
