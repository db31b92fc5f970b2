"""Small tokenizers and drivers for the tests of the tokenizer service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.tokenizer.parsing.calls import CallPolicy
from services.tokenizer.parsing.deltas import CallDelta, ContentDelta, Delta, Finish, ReasoningDelta
from services.tokenizer.parsing.dsml import MARK
from services.tokenizer.parsing.glm import GlmGrammar
from services.tokenizer.parsing.parser import ParserSetup, StreamParser
from services.tokenizer.parsing.qwen import QwenGrammar
from services.tokenizer.parsing.schema import ToolTable
from services.tokenizer.rendering.deepseek import (
    ASSISTANT,
    BOS,
    EOS,
    GROUNDING,
    REMINDER,
    SYSTEM,
    TASKS,
    USER,
)
from services.tokenizer.vocabulary import Vocabulary

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK = ("<think>", "</think>")
DEEPSEEK_SPECIAL = (
    *(BOS, EOS, USER, ASSISTANT, SYSTEM, REMINDER, "<｜▁pad▁｜>", "<｜image｜>"),
    *(f"<｜{task}｜>" for task in TASKS),
    *GROUNDING,
)
GLM_SPECIAL = (
    *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|observation|>", "<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
)
GLM_RESPONSE = ("<tool_response>", "</tool_response>")
STRUCTURAL = (*THINK, "<tool_call>", "</tool_call>")

TEXT = [
    "The quick brown fox jumps over the lazy dog. Why? Because it can!\n\nLook here: 1 + 2 = 3.\n",
    "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. 日本語の文字。 🐴🚀👩‍👩‍👧 naïve café\n",
]

TOOLS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "n": {"type": "integer"},
            "x": {"type": "number"},
            "b": {"type": "boolean"},
            "l": {"type": "array", "items": {"type": "integer"}},
            "o": {"type": "object", "properties": {"k": {"type": "integer"}}},
            "u": {"type": ["string", "null"]},
        },
    },
    "now": {"type": "object", "properties": {}},
    "get": {"type": "object", "properties": {}},
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def tool_table() -> ToolTable:
    """The tools of the shared cases."""
    return ToolTable({name: json.dumps(schema) for name, schema in TOOLS.items()})


def trained_definition(
    vocab_size: int, special: Sequence[str], added: Sequence[str]
) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE trained on the text above."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in added])
    definition: dict[str, Any] = json.loads(tokenizer.to_str())
    return definition


@cache
def byte_level_definition(vocab_size: int = 420) -> dict[str, Any]:
    """tokenizer.json of the Qwen family."""
    return trained_definition(vocab_size, SPECIAL, (*MARKUP, *THINK))


@cache
def deepseek_definition() -> dict[str, Any]:
    """tokenizer.json of the DeepSeek families."""
    return trained_definition(420, DEEPSEEK_SPECIAL, (MARK, *THINK))


@cache
def glm_definition() -> dict[str, Any]:
    """tokenizer.json of the GLM family."""
    return trained_definition(420, GLM_SPECIAL, (*GlmGrammar.specials, *THINK, *GLM_RESPONSE))


@cache
def byte_fallback_definition() -> dict[str, Any]:
    """tokenizer.json of a BPE over whole characters whose other bytes are `<0xNN>` tokens."""
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz.,!\u2581é"))
    vocab = {"<unk>": 0}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for letter in letters:
        vocab[letter] = len(vocab)
    merges = [("\u2581", "a"), ("t", "h"), ("th", "e")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    definition = json.loads(tokenizer.to_str())
    definition["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    return definition


@cache
def vocabulary() -> Vocabulary:
    """The byte-level vocabulary."""
    return Vocabulary(byte_level_definition())


@cache
def reference() -> Tokenizer:
    """The library's own tokenizer of the same file, which takes control tokens for real."""
    return Tokenizer.from_str(json.dumps(byte_level_definition()))


@dataclass
class Result:
    """All that the deltas of one choice add up to. Checks their framing while adding."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    finish: str = ""

    def add(self, deltas: Iterable[Delta]) -> None:
        """Append deltas."""
        for delta in deltas:
            match delta:
                case ReasoningDelta(text):
                    assert text
                    self.reasoning += text
                case ContentDelta(text):
                    assert text
                    self.content += text
                case CallDelta():
                    self._add_call(delta)

    def _add_call(self, delta: CallDelta) -> None:
        if delta.name:
            assert delta.index == len(self.calls), "indices count up without gaps"
            assert delta.id.startswith("call_") and not delta.arguments
            self.calls.append([delta.name, ""])
            self.ids.append(delta.id)
        else:
            assert not delta.id and delta.arguments
            self.calls[delta.index][1] += delta.arguments

    def as_case(self) -> dict[str, Any]:
        """The form of the case files."""
        return {
            "reasoning": self.reasoning,
            "content": self.content,
            "calls": self.calls,
            "finish_reason": self.finish,
        }


_MARKER_SPLIT = re.compile("(" + "|".join(map(re.escape, (*STRUCTURAL, "<|im_end|>"))) + ")")


def pieces_of(text: str) -> list[str]:
    """Text split into ordinary parts and special tokens."""
    return [piece for piece in _MARKER_SPLIT.split(text) if piece]


def chunks(text: str, size: int) -> list[str]:
    """Text in parts of `size` characters."""
    return [text[i : i + size] for i in range(0, len(text), size)]


def make_parser(
    *,
    thinking: bool = True,
    by_id: bool = True,
    policy: CallPolicy | None = None,
    tools: ToolTable | None = None,
) -> StreamParser:
    """A parser for the family of the cases."""
    setup = ParserSetup(
        tool_table() if tools is None else tools,
        policy or CallPolicy(),
        starts_in_reasoning=thinking,
        by_id=frozenset(STRUCTURAL) if by_id else frozenset(),
        dropped=() if by_id else ("<|im_end|>",),
    )
    return StreamParser(setup, QwenGrammar)


def parse(
    parts: Sequence[str], finish: str = "stop", *, by_id: bool = True, **options: Any
) -> Result:
    """Run a parser over parts; with `by_id` a part that is a special token comes as one."""
    parser = make_parser(by_id=by_id, **options)
    result = Result()
    for part in parts:
        if by_id and part in STRUCTURAL:
            parser.special(part)
        elif not (by_id and part == "<|im_end|>"):
            parser.feed(part)
        result.add(parser.take())
    result.finish = parser.finish(Finish(finish)).value
    result.add(parser.take())
    return result
