"""One choice from token ids to deltas: detokenizer, stop strings, parser."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.parsing.deltas import ContentDelta, Delta, Finish
from services.tokenizer.stops import Piece, StopFilter
from services.tokenizer.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


class Treatment(Enum):
    """What is done with an added token."""

    MARKER = "marker"
    DROP = "drop"
    TEXT = "text"


class Parser(Protocol):
    """What a session drives: `parsing.parser.StreamParser` or `PlainText`."""

    @property
    def in_reasoning(self) -> bool: ...

    @property
    def refused(self) -> int: ...

    def feed(self, text: str) -> None: ...

    def special(self, text: str) -> None: ...

    def take(self) -> list[Delta]: ...

    def finish(self, reason: Finish, *, stop_string: bool, named: bool) -> Finish: ...


class PlainText:
    """The parser of completions: every text is content."""

    in_reasoning = False
    refused = 0

    def __init__(self) -> None:
        self._texts: list[str] = []

    def feed(self, text: str) -> None:
        """Take text."""
        self._texts.append(text)

    special = feed

    def take(self) -> list[Delta]:
        """Return the text since the last time as at most one delta."""
        text = "".join(self._texts)
        self._texts.clear()
        return [ContentDelta(text)] if text else []

    def finish(self, reason: Finish, *, stop_string: bool, named: bool) -> Finish:
        """Return the engine's reason."""
        return reason


@dataclass(frozen=True, slots=True)
class StopSetup:
    """Stop strings of a request."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False


@dataclass(slots=True)
class Update:
    """What a session has to say about some tokens or about the end."""

    deltas: list[Delta] = field(default_factory=list)
    stop_matched: int | None = None
    tokens_used: int | None = None
    finish: Finish | None = None
    reasoning_tokens: int = 0


class ParseSession:
    """State of one choice. Not thread-safe; costs the same at every length of the output."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        parser: Parser,
        treatments: Mapping[int, tuple[Treatment, str]],
        stop: StopSetup,
        *,
        named: bool = False,
    ) -> None:
        """treatments: tokens that are not ordinary text, with their text.

        named: the client forced one tool, which leaves the finish reason as it is.
        """
        self._detokenizer = detokenizer
        self._parser = parser
        self._treatments = treatments
        self._stops = StopFilter(stop.stops, include_stop=stop.include_stop) if stop.stops else None
        self._named = named
        self._reasoning_tokens = 0

    def push(self, ids: Sequence[int]) -> Update:
        """Take new tokens. After a stop string has matched they are ignored."""
        if self._stops is None:
            self._push(ids)
            return self._update()
        if self._stops.matched is not None:
            return self._update(tokens_used=0)
        for count, token_id in enumerate(ids, start=1):
            self._push_guarded(self._stops, token_id)
            if self._stops.matched is not None:
                return self._update(tokens_used=count)
        return self._update()

    def finish(self, reason: Finish) -> Update:
        """End the choice; nothing may follow."""
        stops = self._stops
        matched = stops is not None and stops.matched is not None
        if not matched:
            rest = self._detokenizer.flush()
            if stops is None:
                self._parser.feed(rest)
            else:
                self._deliver([*stops.push(Piece(rest)), *stops.flush()])
                matched = stops.matched is not None
        final = self._parser.finish(reason, stop_string=matched, named=self._named)
        if self._parser.refused:
            logger.warning("%d pieces of tool-call markup gave no call", self._parser.refused)
        update = self._update()
        update.finish = final
        return update

    def _update(self, tokens_used: int | None = None) -> Update:
        matched = self._stops.matched if self._stops is not None else None
        return Update(
            self._parser.take(), matched, tokens_used, reasoning_tokens=self._reasoning_tokens
        )

    def _push(self, ids: Sequence[int]) -> None:
        texts: list[str] = []
        for token_id in ids:
            treatment = self._treatments.get(token_id)
            if treatment is None:
                texts.append(self._detokenizer.push(token_id))
            elif treatment[0] is not Treatment.DROP:
                self._feed(texts)
                texts = []
                self._apply(treatment)
        self._feed(texts)

    def _feed(self, texts: list[str]) -> None:
        """Give the parser the text of some tokens, one text each."""
        if not texts:
            return
        if self._parser.in_reasoning:
            self._reasoning_tokens += len(texts)
        text = "".join(texts)
        if text:
            self._parser.feed(text)

    def _apply(self, treatment: tuple[Treatment, str]) -> None:
        """Give the parser an added token. A character before it can no longer be completed."""
        rest = self._detokenizer.flush()
        if rest:
            self._parser.feed(rest)
        kind, text = treatment
        if kind is Treatment.MARKER:
            self._parser.special(text)
        else:
            self._feed([text])

    def _push_guarded(self, stops: StopFilter, token_id: int) -> None:
        treatment = self._treatments.get(token_id)
        if treatment is None:
            self._deliver(stops.push(Piece(self._detokenizer.push(token_id), tokens=1)))
        elif treatment[0] is not Treatment.DROP:
            self._deliver(stops.push(Piece(self._detokenizer.flush())))
            if stops.matched is None:
                special = treatment[0] is Treatment.MARKER
                self._deliver(stops.push(Piece(treatment[1], special, tokens=1)))

    def _deliver(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.special:
                self._parser.special(piece.text)
            else:
                if self._parser.in_reasoning:
                    self._reasoning_tokens += piece.tokens
                self._parser.feed(piece.text)


def treatments(
    vocabulary: Vocabulary,
    markers: frozenset[str],
    markup: frozenset[str],
    *,
    skip_special: bool,
) -> dict[int, tuple[Treatment, str]]:
    """Return how the added tokens of a vocabulary are treated.

    markers: texts that the parser takes as markers. markup: texts that are shown where the parser
    does not take them. skip_special: drop the other tokens that are marked special.
    """
    table: dict[int, tuple[Treatment, str]] = {}
    for token in vocabulary.added.values():
        if token.text in markers:
            kind = Treatment.MARKER
        elif token.special and skip_special and token.text not in markup:
            kind = Treatment.DROP
        else:
            kind = Treatment.TEXT
        table[token.token_id] = (kind, token.text)
    return table
