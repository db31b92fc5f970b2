"""Compiled grammars as bytes, and what follows an output through one.

xgrammar comes first; llguidance takes the JSON schemas and regular expressions that it refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from services.engine.grammar.forms import (
    GrammarError,
    parse,
    structural_tag,
    with_whitespace,
)
from services.engine.grammar.vocabulary import (
    LLGUIDANCE_END,
    llguidance_vocabulary,
    xgrammar_vocabulary,
)

Mask = npt.NDArray[np.uint32]

_XGRAMMAR, _LLGUIDANCE = b"x", b"l"
_PLACE = re.compile(r"^(\[[0-9:]+\] \S+: |at \d+\(\d+\): )")
_SECOND_CHANCE = ("json_schema", "regex")
# Found by walks through grammars; with a bounded length it lets control characters pass too.
_IGNORED = frozenset(
    {"minLength", "maxLength", "multipleOf", "uniqueItems", "contains", "not", "if"}
)


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
    if whitespace:
        ruled = with_whitespace(form, value, whitespace)
        compiled = _LLGUIDANCE + _with_llguidance("json_schema", ruled, gap, folder, vocab_size)
    elif form == "json_schema" and _is_beyond_xgrammar(parse(value, "the schema")):
        compiled = _LLGUIDANCE + _with_llguidance(form, value, gap, folder, vocab_size)
    else:
        compiled = _compile(form, value, gap, folder, vocab_size)
    if make_matcher(compiled, folder, vocab_size, (0,)).stuck:
        raise GrammarError("the grammar allows no output")
    return compiled


def _compile(form: str, value: Any, gap: bool, folder: Path, vocab_size: int) -> bytes:
    try:
        return _XGRAMMAR + _with_xgrammar(form, value, gap, folder, vocab_size)
    except GrammarError:
        if form not in _SECOND_CHANCE:
            raise
        return _LLGUIDANCE + _with_llguidance(form, value, gap, folder, vocab_size)


def _is_beyond_xgrammar(schema: Any) -> bool:
    """Whether a schema has keywords that xgrammar takes and does not enforce."""
    if isinstance(schema, dict):
        return not _IGNORED.isdisjoint(schema) or any(map(_is_beyond_xgrammar, schema.values()))
    return isinstance(schema, list) and any(map(_is_beyond_xgrammar, schema))


def _with_xgrammar(form: str, value: Any, gap: bool, folder: Path, vocab_size: int) -> bytes:
    import xgrammar

    tag = structural_tag(form, value, gap=gap)
    vocabulary = xgrammar_vocabulary(folder, vocab_size)
    try:
        compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
        text: str = compiler.compile_structural_tag(tag).serialize_json()
    except (RuntimeError, ValueError, TypeError, RecursionError) as error:
        raise GrammarError(_reason(error)) from None
    return text.encode()


def _with_llguidance(form: str, value: Any, gap: bool, folder: Path, vocab_size: int) -> bytes:
    import llguidance

    rule = f"%json {value}" if form == "json_schema" else f"/{value.replace('/', chr(92) + '/')}/"
    head = "start: GAP answer\nGAP: /\\n{0,2}/\nanswer: " if gap else "start: "
    grammar: str = llguidance.LLMatcher.grammar_from_lark(f"{head}{rule}\n")
    matcher = llguidance.LLMatcher(llguidance_vocabulary(folder, vocab_size), grammar)
    if matcher.is_error():
        raise GrammarError(_reason(matcher.get_error()))
    return grammar.encode()


def _reason(error: object) -> str:
    """What a library says, without the place in its own source or in our wrapping."""
    lines = [line for line in str(error).splitlines() if line.strip()] or ["it is not supported"]
    return _PLACE.sub("", lines[0])[:200]


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

        vocabulary = llguidance_vocabulary(folder, vocab_size)
        self._matcher = llguidance.LLMatcher(vocabulary, grammar.decode())
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
