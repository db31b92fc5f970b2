"""What follows from a checkpoint's model type: rules, built-in template, parsers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from services.tokenizer.parsing.registry import ParserNames
from services.tokenizer.rendering.deepseek import (
    ASSISTANT,
    EOS,
    GROUNDING,
    SYSTEM,
    USER,
    V4,
    V41,
    Dialect,
)
from services.tokenizer.rendering.rules import FamilyRules, GlmRules, PlainRules, QwenRules

_TEMPLATES = Path(__file__).parent / "rendering"


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models.

    default_template: file of the chat format for checkpoints that bring none. dialect: of prompts
    that are written without a template; then rules and templates do not matter. turn_ends: tokens
    that end a turn. boundaries: tokens at which a turn begins or ends; in front of the last one
    of a prompt nothing says how its output begins. shown: special tokens that stay in answers.
    """

    name: str
    rules: Callable[[Mapping[str, str]], FamilyRules]
    parsers: ParserNames
    default_template: Path | None
    turn_ends: tuple[str, ...]
    boundaries: tuple[str, ...]
    dialect: Dialect | None = None
    shown: tuple[str, ...] = ()

    def template(self) -> str | None:
        """Return the text of the built-in template, if there is one."""
        return self.default_template.read_text("utf-8") if self.default_template else None


def _qwen(name: str) -> Family:
    return Family(
        name,
        QwenRules,
        ParserNames("qwen3", "qwen3_xml"),
        _TEMPLATES / "chatml.jinja",
        turn_ends=("<|im_end|>",),
        boundaries=("<|im_start|>", "<|im_end|>"),
    )


def _deepseek(name: str, dialect: Dialect) -> Family:
    return Family(
        name,
        PlainRules,
        ParserNames(name, name),
        None,
        turn_ends=(EOS,),
        boundaries=(USER, ASSISTANT, SYSTEM),
        dialect=dialect,
        shown=GROUNDING,
    )


_DEEPSEEK_V4 = _deepseek("deepseek_v4", V4)
_DEEPSEEK_V41 = _deepseek("deepseek_v41", V41)
_GLM = Family(
    "glm5_next",
    GlmRules,
    ParserNames("glm45", "glm47"),
    _TEMPLATES / "glm.jinja",
    turn_ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
    boundaries=("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
)
_QWEN35 = _qwen("qwen3_5")
_QWEN4 = _qwen("qwen4_exp")
_UNKNOWN = Family(
    "",
    PlainRules,
    ParserNames(),
    None,
    turn_ends=("<|im_end|>",),
    boundaries=("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>"),
)

# Model types of config.json, of the whole model and of its text part.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "deepseek_v4": _DEEPSEEK_V4,
        "deepseek_v4_text": _DEEPSEEK_V4,
        "deepseek_v41": _DEEPSEEK_V41,
        "deepseek_v41_text": _DEEPSEEK_V41,
        "glm5_next": _GLM,
        "glm5_next_text": _GLM,
        "qwen3_5": _QWEN35,
        "qwen3_5_text": _QWEN35,
        "qwen4_exp": _QWEN4,
        "qwen4_exp_text": _QWEN4,
    }
)


def family_of(model_type: str) -> Family:
    """Return the family of a model type; one without rules of its own when it is not known."""
    return FAMILIES.get(model_type, _UNKNOWN)
