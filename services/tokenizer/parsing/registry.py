"""Parser names, their aliases, and which ones a checkpoint asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from services.tokenizer.parsing.dsml import DsmlGrammar
from services.tokenizer.parsing.glm import GlmGrammar
from services.tokenizer.parsing.parser import ToolGrammar
from services.tokenizer.parsing.qwen import QwenGrammar

NONE = "none"

# All reasoning parsers read the same two tokens; the names are those that users know.
_REASONING: Mapping[str, str] = MappingProxyType(
    {
        "qwen3": "qwen3",
        "deepseek_v4": "deepseek_v4",
        "deepseek-v4": "deepseek_v4",
        "deepseek_v41": "deepseek_v41",
        "deepseek-v41": "deepseek_v41",
        "glm45": "glm45",
        "glm47": "glm45",
    }
)
_TOOLS: Mapping[str, type[ToolGrammar]] = MappingProxyType(
    {
        "qwen3_xml": QwenGrammar,
        "deepseek_v4": DsmlGrammar,
        "deepseek_v41": DsmlGrammar,
        "glm47": GlmGrammar,
    }
)
_TOOL_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "qwen3_coder": "qwen3_xml",
        "deepseekv4": "deepseek_v4",
        "deepseekv41": "deepseek_v41",
        "glm45": "glm47",
    }
)


class UnknownParserError(ValueError):
    """A parser name that is not known; its text lists the known ones."""


@dataclass(frozen=True, slots=True)
class ParserNames:
    """The parsers of a checkpoint or request; "none" where one is off."""

    reasoning: str = NONE
    tools: str = NONE


def reasoning_parser(name: str) -> str:
    """Return the canonical name of a reasoning parser.

    Raises UnknownParserError.
    """
    if name == NONE or name in _REASONING:
        return _REASONING.get(name, NONE)
    raise UnknownParserError(_unknown("reasoning parser", name, _REASONING))


def tool_parser(name: str) -> str:
    """Return the canonical name of a tool-call parser.

    Raises UnknownParserError.
    """
    canonical = _TOOL_ALIASES.get(name, name)
    if canonical == NONE or canonical in _TOOLS:
        return canonical
    raise UnknownParserError(_unknown("tool-call parser", name, [*_TOOLS, *_TOOL_ALIASES]))


def grammar(name: str) -> type[ToolGrammar] | None:
    """Return the grammar of a canonical tool parser name; None for "none"."""
    return _TOOLS.get(name)


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    names = ", ".join([*sorted(known), NONE])
    return f"unknown {kind} {name[:64]!r}; known: {names}"


def markup_texts() -> frozenset[str]:
    """Return the markers of all families that are tokens of their own: text where no parser
    takes them, never dropped."""
    texts = {"<think>", "</think>"}
    for tools in _TOOLS.values():
        texts.update(tools.specials)
    return frozenset(texts)
