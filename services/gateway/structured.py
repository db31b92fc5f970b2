"""What an output must look like: from request fields to the engine's grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from warhorse.v1 import engine_pb2, tokenizer_pb2

from services.gateway.closed_schema import closed
from services.gateway.errors import bad_request
from services.gateway.plan import Prompt
from services.gateway.schema.sampling import SamplingRequest
from services.gateway.schema.structured import ResponseFormat, StructuredOutputs

MAX_TEXT = 256 << 10
MAX_CHOICES = 1024
# Fields of other servers and of older versions -> the form that they ask for.
_LEGACY: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "structural_tag": "structural_tag",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A grammar, and the field of the request that it comes from."""

    grammar: engine_pb2.Grammar
    field: str


def output_grammar(request: SamplingRequest) -> Wanted | None:
    """The grammar that `response_format` and its kin ask for. Raises ApiError 400."""
    found = [Wanted(grammar, name) for name, grammar in _asked(request) if grammar is not None]
    if len(found) > 1:
        names = " and ".join(f"`{wanted.field}`" for wanted in found)
        raise bad_request(f"{names} cannot be used together.", found[1].field)
    return found[0] if found else None


def _asked(request: SamplingRequest) -> list[tuple[str, engine_pb2.Grammar | None]]:
    asked = [
        ("response_format", _of_format(request.response_format)),
        ("structured_outputs", _of_outputs(request.structured_outputs)),
    ]
    for name, form in _LEGACY.items():
        value = getattr(request, name)
        if value is not None and value is not False:
            asked.append((name, _of(form, value, name)))
    return asked


def _of_format(wanted: ResponseFormat | None) -> engine_pb2.Grammar | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return engine_pb2.Grammar(json_object=True)
    if wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            param = "response_format.json_schema"
            raise bad_request(f"`{param}` must be an object with a `schema`.", param)
        return _of("json", wanted.json_schema.schema_, "response_format.json_schema.schema")
    return _of("structural_tag", wanted.model_dump(exclude_none=True), "response_format")


def _of_outputs(wanted: StructuredOutputs | None) -> engine_pb2.Grammar | None:
    if wanted is None:
        return None
    given = wanted.forms()
    if len(given) != 1:
        message = "`structured_outputs` must hold exactly one of " + ", ".join(wanted.names()) + "."
        raise bad_request(message, "structured_outputs")
    ((form, value),) = given.items()
    if wanted.disable_additional_properties:
        _check_option("disable_additional_properties", form, ("json",))
        value = _closed(value, "structured_outputs.json")
    grammar = _of(form, value, f"structured_outputs.{form}")
    _rule_whitespace(wanted, form, grammar)
    return grammar


def _check_option(name: str, form: str, forms: tuple[str, ...]) -> None:
    if form not in forms:
        known = " or ".join(f"`{known}`" for known in forms)
        param = f"structured_outputs.{name}"
        raise bad_request(f"`{param}` needs {known}, got `{form}`.", param)


def _closed(value: Any, param: str) -> Any:
    """The schema without further properties; text that is no JSON is for the compiler to refuse."""
    try:
        return closed(orjson.loads(value) if isinstance(value, str) else value)
    except orjson.JSONDecodeError:
        return value
    except RecursionError:
        raise bad_request(f"`{param}` is nested too deeply.", param) from None


def _rule_whitespace(wanted: StructuredOutputs, form: str, grammar: engine_pb2.Grammar) -> None:
    fixed, pattern = wanted.disable_any_whitespace, wanted.whitespace_pattern
    if fixed:
        _check_option("disable_any_whitespace", form, ("json", "json_object"))
        grammar.fixed_whitespace = True
    if pattern is None:
        return
    param = "structured_outputs.whitespace_pattern"
    _check_option("whitespace_pattern", form, ("json", "json_object"))
    if fixed:
        raise bad_request(f"`{param}` and `disable_any_whitespace` exclude each other.", param)
    grammar.whitespace_pattern = _bounded(pattern, param)


def _of(form: str, value: Any, param: str) -> engine_pb2.Grammar:
    match form:
        case "json":
            return engine_pb2.Grammar(json_schema=_text(value, param))
        case "json_object":
            return engine_pb2.Grammar(json_object=True)
        case "regex":
            return engine_pb2.Grammar(regex=_plain(value, param))
        case "grammar":
            return engine_pb2.Grammar(ebnf=_plain(value, param))
        case "choice":
            return engine_pb2.Grammar(ebnf=_choices(value, param))
        case _:
            return engine_pb2.Grammar(structural_tag=_text(value, param))


def _plain(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad_request(f"`{param}` must be a non-empty text.", param)
    return _bounded(value, param)


def _text(value: Any, param: str) -> str:
    """JSON text of an object; a text is taken as JSON text already."""
    if isinstance(value, str):
        return _bounded(value, param)
    if not isinstance(value, dict | bool):
        raise bad_request(f"`{param}` must be an object.", param)
    try:
        return _bounded(orjson.dumps(value).decode(), param)
    except orjson.JSONEncodeError:
        raise bad_request(f"`{param}` is nested too deeply.", param) from None


def _bounded(text: str, param: str) -> str:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT:
        raise bad_request(f"`{param}` must have at most {MAX_TEXT} bytes, got more.", param)
    return text


def _choices(value: Any, param: str) -> str:
    is_list = isinstance(value, list) and 1 <= len(value) <= MAX_CHOICES
    if not is_list or not all(isinstance(v, str) and v for v in value):
        message = f"`{param}` must be a list of 1 to {MAX_CHOICES} non-empty texts."
        raise bad_request(message, param)
    return _bounded("root ::= " + " | ".join(orjson.dumps(v).decode() for v in value), param)


def call_grammar(
    opening: tokenizer_pb2.ParseOpen, parser: str, tool_name: str, *, auto: bool
) -> Wanted | None:
    """The grammar of the tool calls of a request; None where calls are free.

    `parser` is the served tool-call parser. `auto`: calls that the model makes of its own accord
    follow their schemas too.
    """
    choice = opening.tool_choice
    if choice == tokenizer_pb2.TOOL_CHOICE_NONE:
        return None
    if choice == tokenizer_pb2.TOOL_CHOICE_AUTO and not auto:
        return None
    calls = engine_pb2.ToolCallGrammar(
        parser=opening.tool_call_parser or parser,
        tools=opening.tools,
        choice=choice,
        tool_name=tool_name,
        parallel=opening.parallel_tool_calls,
    )
    return Wanted(engine_pb2.Grammar(tool_calls=calls), "tools")


def chosen(calls: Wanted | None, output: Wanted | None, *, forced: bool) -> Wanted | None:
    """Forced calls come before a format, and a format before calls that the model may make."""
    return calls if calls is not None and (forced or output is None) else output


def placed(wanted: Wanted | None, prompt: Prompt) -> engine_pb2.Grammar | None:
    """The grammar, behind the reasoning where the output begins inside one."""
    if wanted is not None and prompt.reasoning_end is not None:
        wanted.grammar.after_token_id = prompt.reasoning_end
    return wanted.grammar if wanted is not None else None
