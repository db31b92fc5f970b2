"""Small tokenizers and drivers for the tests of the tokenizer service."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.tokenizer.parsing import registry
from services.tokenizer.parsing.calls import CallPolicy
from services.tokenizer.parsing.deltas import CallDelta, ContentDelta, Delta, Finish, ReasoningDelta
from services.tokenizer.parsing.dsml import MARK
from services.tokenizer.parsing.glm import GlmGrammar
from services.tokenizer.parsing.parser import ParserSetup, StreamParser, ToolGrammar
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


@dataclass(frozen=True)
class Format:
    """A family's tool format: its parser, its vocabulary, and the tokens that end a turn."""

    parser: str
    definition: Callable[[], dict[str, Any]]
    ends: tuple[str, ...]

    @property
    def grammar(self) -> type[ToolGrammar]:
        found = registry.grammar(self.parser)
        assert found is not None
        return found

    @property
    def structural(self) -> tuple[str, ...]:
        """Markers that are tokens of their own."""
        return (*THINK, *self.grammar.specials)

    @property
    def split(self) -> re.Pattern[str]:
        return re.compile("(" + "|".join(map(re.escape, (*self.structural, *self.ends))) + ")")


FORMATS = {
    "dsv4": Format("deepseek_v4", deepseek_definition, (EOS,)),
    "dsv41": Format("deepseek_v41", deepseek_definition, (EOS,)),
    "glm": Format("glm47", glm_definition, ("<|user|>", "<|observation|>")),
    "qwen": Format("qwen3_xml", byte_level_definition, ("<|im_end|>",)),
}


def pieces_of(text: str, family: str = "qwen") -> list[str]:
    """Text split into ordinary parts and special tokens."""
    return [piece for piece in FORMATS[family].split.split(text) if piece]


def chunks(text: str, size: int) -> list[str]:
    """Text in parts of `size` characters."""
    return [text[i : i + size] for i in range(0, len(text), size)]


def cut_pieces(text: str, size: int, family: str = "qwen") -> list[str]:
    """Ordinary parts cut to `size` characters, special tokens whole."""
    form = FORMATS[family]
    whole = (*form.structural, *form.ends)
    pieces = pieces_of(text, family)
    return [c for piece in pieces for c in ([piece] if piece in whole else chunks(piece, size))]


def make_parser(
    family: str = "qwen",
    *,
    thinking: bool = True,
    by_id: bool = True,
    policy: CallPolicy | None = None,
    tools: ToolTable | None = None,
    strict: bool = False,
) -> StreamParser:
    """A parser of a family for the tools of the cases."""
    form = FORMATS[family]
    setup = ParserSetup(
        tool_table() if tools is None else tools,
        policy or CallPolicy(),
        starts_in_reasoning=thinking,
        by_id=frozenset(form.structural) if by_id else frozenset(),
        dropped=() if by_id else form.ends,
        strict=strict,
    )
    return StreamParser(setup, form.grammar)


def parse(
    parts: Sequence[str],
    finish: str = "stop",
    *,
    family: str = "qwen",
    by_id: bool = True,
    **options: Any,
) -> Result:
    """Run a parser over parts; with `by_id` a part that is a special token comes as one."""
    parser = make_parser(family, by_id=by_id, **options)
    form = FORMATS[family]
    result = Result()
    for part in parts:
        if by_id and part in form.structural:
            parser.special(part)
        elif not (by_id and part in form.ends):
            parser.feed(part)
        result.add(parser.take())
    result.finish = parser.finish(Finish(finish)).value
    result.add(parser.take())
    return result


def every_cut(text: str, finish: str = "stop", *, family: str = "qwen", **options: Any) -> Result:
    """Parse a stream cut in several ways and return the one result they all give."""
    results = []
    for size in (1, 2, 5, 10**6):
        results.append(parse(cut_pieces(text, size, family), finish, family=family, **options))
        results[-1].ids.clear()
    assert all(result == results[0] for result in results)
    return results[0]
