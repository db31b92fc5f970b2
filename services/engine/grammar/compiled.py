"""Compiled grammars as bytes, and what follows an output through one.

xgrammar comes first; llguidance takes the JSON schemas that it refuses or does not keep to, and
the regular expressions that it refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from services.engine.grammar.apart import choose_any
from services.engine.grammar.enforced import fits_xgrammar, for_llguidance
from services.engine.grammar.errors import GrammarError
from services.engine.grammar.finite import check_end
from services.engine.grammar.forms import MAX_GAP, parse, structural_tag
from services.engine.grammar.reword import reword
from services.engine.grammar.schema import Schema
from services.engine.grammar.vocabulary import (
    LLGUIDANCE_END,
    llguidance_vocabulary,
    xgrammar_vocabulary,
)

Mask = npt.NDArray[np.uint32]

_XGRAMMAR, _LLGUIDANCE = b"x", b"l"
_PLACE = re.compile(r"^(\[[0-9:]+\] \S+: |at \d+\(\d+\): )")


class Matcher(Protocol):
    """The place of one output within a grammar."""

    @property
    def ended(self) -> bool:
        """Whether a stop token was accepted: nothing follows."""
        ...

    @property
    def stuck(self) -> bool:
        """Whether the grammar lets nothing follow, not even an end."""
        ...

    def accept(self, token: int) -> bool:
        """Take a token; False, and nothing changes, where the grammar forbids it."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        ...

    def skip(self, text: str) -> None:
        """Take a text that the grammar allows, in tokens of no matter which lengths."""
        ...

    def mask(self) -> Mask:
        """The tokens that may follow, a bit each, lowest bit first: [ceil(vocab / 32)]."""
        ...


def compile_grammar(
    form: str,
    value: Any,
    *,
    gap: bool,
    folder: Path,
    vocab_size: int,
    whitespace: Mapping[str, Any] | None = None,
) -> bytes:
    """Compile one form of a Grammar message. Raises GrammarError.

    `gap`: reasoning comes in front. `whitespace`: llguidance's rules of it, for JSON. The first
    mask is made too, so that what is slow shows here.
    """
    try:
        if form == "json_schema" or whitespace:
            compiled = _compile_schema(form, value, whitespace or {}, gap, folder, vocab_size)
        else:
            compiled = _compile(form, value, gap, folder, vocab_size)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    _check_output(make_matcher(compiled, folder, vocab_size, (0,)), gap)
    return compiled


def _check_output(start: Matcher, gap: bool) -> None:
    """Raise GrammarError where nothing follows, or nothing but the gap."""
    is_stuck = start.stuck
    if gap and not is_stuck:
        start.skip(MAX_GAP)
        is_stuck = start.stuck
    if is_stuck:
        raise GrammarError("the grammar allows no output")


def _compile_schema(
    form: str, value: Any, whitespace: Mapping[str, Any], gap: bool, folder: Path, vocab_size: int
) -> bytes:
    text = value if form == "json_schema" else '{"type": "object"}'
    schema = Schema(parse(text, "the schema"))
    check_end(schema)
    reword(schema)
    choose_any(schema)
    if not whitespace and fits_xgrammar(schema):
        with suppress(GrammarError):
            reworded = json.dumps(schema.root)
            return _XGRAMMAR + _with_xgrammar(form, reworded, gap, folder, vocab_size)
    rule = f"%json {for_llguidance(schema, whitespace)}"
    return _LLGUIDANCE + _with_llguidance(rule, gap, folder, vocab_size)


def _compile(form: str, value: Any, gap: bool, folder: Path, vocab_size: int) -> bytes:
    try:
        return _XGRAMMAR + _with_xgrammar(form, value, gap, folder, vocab_size)
    except GrammarError:
        if form != "regex":
            raise
        rule = f"/{value.replace('/', chr(92) + '/')}/"
        return _LLGUIDANCE + _with_llguidance(rule, gap, folder, vocab_size)


def _with_xgrammar(form: str, value: Any, gap: bool, folder: Path, vocab_size: int) -> bytes:
    import xgrammar

    vocabulary = xgrammar_vocabulary(folder, vocab_size)
    try:
        tag = structural_tag(form, value, gap=gap)
        compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
        text: str = compiler.compile_structural_tag(tag).serialize_json()
    except (RuntimeError, ValueError, TypeError, RecursionError) as error:
        raise GrammarError(_reason(error)) from None
    return text.encode()


def _with_llguidance(rule: str, gap: bool, folder: Path, vocab_size: int) -> bytes:
    import llguidance

    head = "start: GAP answer\nGAP: /\\n{0,2}/\nanswer: " if gap else "start: "
    grammar: str = llguidance.LLMatcher.grammar_from_lark(f"{head}{rule}\n")
    matcher = llguidance.LLMatcher(llguidance_vocabulary(folder, vocab_size), grammar)
    if matcher.is_error():
        raise GrammarError(_reason(matcher.get_error()))
    return grammar.encode()


def _reason(error: object) -> str:
    """What a library says, without the place in its own source or in our wrapping."""
    if "std::bad_alloc" in str(error):
        return "it needs too much memory"
    lines = [line for line in str(error).splitlines() if line.strip()] or ["it is not supported"]
    # Those of a regular expression draw its place first.
    further = [line.removeprefix("error:") for line in lines[1:] if line.startswith("error:")]
    return "".join([_PLACE.sub("", lines[0]), *further])[:200]


def make_matcher(
    compiled: bytes, folder: Path, vocab_size: int, stop_token_ids: Sequence[int]
) -> Matcher:
    """A matcher at the beginning of an output that ends with one of `stop_token_ids`."""
    if compiled[:1] == _LLGUIDANCE:
        return _LlguidanceMatcher(compiled[1:], folder, vocab_size, stop_token_ids)
    return _XgrammarMatcher(compiled[1:], folder, vocab_size, stop_token_ids)


@lru_cache(maxsize=64)
def _loaded(compiled: bytes, folder: Path, vocab_size: int) -> Any:
    import xgrammar

    vocabulary = xgrammar_vocabulary(folder, vocab_size)
    return xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), vocabulary)


def _or_end(mask: Mask, stops: frozenset[int]) -> Mask:
    """The mask, or where it is empty that of an end."""
    if not mask.any():
        for token in stops:
            mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


class _XgrammarMatcher:
    """See `Matcher`. Where a grammar leads to a place that nothing can follow, the output ends."""

    def __init__(
        self, compiled: bytes, folder: Path, vocab_size: int, stop_token_ids: Sequence[int]
    ) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(
            _loaded(compiled, folder, vocab_size), override_stop_tokens=list(stop_token_ids)
        )
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._stops = frozenset(stop_token_ids)
        self._given_up = False

    @property
    def ended(self) -> bool:
        return self._given_up or bool(self._matcher.is_terminated())

    @property
    def stuck(self) -> bool:
        return not self._following().any()

    def accept(self, token: int) -> bool:
        if self._matcher.accept_token(token):
            return True
        self._given_up = token in self._stops and self.stuck
        return self._given_up

    def rollback(self, count: int) -> None:
        if count and self._given_up:
            self._given_up = False
            count -= 1
        if count:
            self._matcher.rollback(count)

    def skip(self, text: str) -> None:
        self._matcher.accept_string(text)

    def mask(self) -> Mask:
        return _or_end(self._following(), self._stops)

    def _following(self) -> Mask:
        self._matcher.fill_next_token_bitmask(self._bitmask, 0)
        row: npt.NDArray[np.int32] = self._bitmask[0].numpy()
        return row.view(np.uint32).copy()


class _LlguidanceMatcher:
    """See `Matcher`. The library knows one end token; here any stop token ends a whole output."""

    def __init__(
        self, grammar: bytes, folder: Path, vocab_size: int, stop_token_ids: Sequence[int]
    ) -> None:
        import llguidance

        self._vocabulary = llguidance_vocabulary(folder, vocab_size)
        self._matcher = llguidance.LLMatcher(self._vocabulary, grammar.decode())
        self._stops = frozenset(stop_token_ids)
        self._words = -(-vocab_size // 32)
        self.ended = False

    @property
    def stuck(self) -> bool:
        return not self._following().any()

    def accept(self, token: int) -> bool:
        if token in self._stops:
            self.ended = bool(self._matcher.is_accepting()) or self.stuck
            return self.ended
        return bool(self._matcher.try_consume_tokens([token]))

    def rollback(self, count: int) -> None:
        if count and self.ended:
            self.ended = False
            count -= 1
        if count:
            self._matcher.rollback(count)

    def skip(self, text: str) -> None:
        self._matcher.consume_tokens(self._vocabulary.tokenize_str(text))

    def mask(self) -> Mask:
        return _or_end(self._following(), self._stops)

    def _following(self) -> Mask:
        words = np.zeros(self._words, dtype=np.uint32)
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: self._words]
        words[: packed.size] = packed
        accepting = bool(self._matcher.is_accepting())
        for token in self._stops | {LLGUIDANCE_END}:
            bit = np.uint32(1 << (token % 32))
            allowed = accepting and token in self._stops
            word = words[token // 32]
            words[token // 32] = word | bit if allowed else word & ~bit
        return words
