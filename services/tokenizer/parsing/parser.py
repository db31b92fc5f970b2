"""The parser of one choice: reasoning and content states, and the tool grammar of a family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from services.tokenizer.parsing.calls import CallPolicy, CallWriter
from services.tokenizer.parsing.deltas import Delta, Finish
from services.tokenizer.parsing.lexer import Marker, MarkerSet, Token, marker, marker_set
from services.tokenizer.parsing.machine import Machine, State
from services.tokenizer.parsing.output import Output
from services.tokenizer.parsing.schema import ToolTable

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(frozen=True, slots=True)
class ParserSetup:
    """What a parser needs to know about its choice.

    reasoning: whether reasoning is told from content. starts_in_reasoning: the prompt ends inside
    it; continues_reasoning: the prompt already holds some of it, so that newlines at the start
    are text. by_id: texts of markers that are tokens of their own and come through `special`;
    all others are found in the text. dropped: texts (turn ends) to drop where they come as text.
    strict: no call is made of broken markup.
    """

    tools: ToolTable
    policy: CallPolicy
    reasoning: bool = True
    starts_in_reasoning: bool = True
    continues_reasoning: bool = False
    by_id: frozenset[str] = frozenset()
    dropped: tuple[str, ...] = ()
    strict: bool = False


class ToolGrammar(ABC):
    """The tool-call markup of a family. One object per choice."""

    # Markers that are one token in the family's vocabulary.
    specials: tuple[str, ...] = ()

    def __init__(self, parser: StreamParser) -> None:
        self.parser = parser

    def markers(self, *candidates: Marker) -> MarkerSet:
        """Return the set of those markers that are found in text, with those to drop."""
        setup = self.parser.setup
        dropped = [marker(text, text) for text in setup.dropped]
        return marker_set(tuple(m for m in (*candidates, *dropped) if m.name not in setup.by_id))

    def joined(self, token: Token, held: str) -> tuple[Token, str]:
        """Return a special token with what of the held text belongs to it, and the rest."""
        return token, held

    @abstractmethod
    def openers(self, *, in_reasoning: bool) -> tuple[Marker, ...]:
        """Return the markers that may begin a call in reasoning or content."""

    @abstractmethod
    def open(self, token: Token) -> bool:
        """Take an opener or a special of this grammar met outside of calls.

        Returns False when the token is plain text after all.
        """


class StreamParser:
    """Text and special tokens of one choice in, deltas out.

    Owns the machine, the output and the call writer that its states work on.
    """

    def __init__(self, setup: ParserSetup, grammar: type[ToolGrammar] | None) -> None:
        self.setup = setup
        self.output = Output(strip_reasoning=not setup.continues_reasoning)
        self.calls = CallWriter(self.output, setup.tools, setup.policy)
        self.grammar = grammar(self) if grammar else None
        self.reasoning = ReasoningState(self)
        self.content = ContentState(self)
        starts_in_reasoning = setup.reasoning and setup.starts_in_reasoning
        first = self.reasoning if starts_in_reasoning else self.content
        self.machine = Machine(first, frozenset(setup.dropped))
        self.reasoning_closed = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self.machine.state is self.reasoning

    @property
    def refused(self) -> int:
        """Pieces of tool-call markup of which no call was made."""
        return self.calls.refused

    def feed(self, text: str) -> None:
        """Take ordinary text."""
        self.machine.feed(text)

    def special(self, text: str) -> None:
        """Take a structural special token by its text."""
        self.machine.special(Token(text, text))

    def take(self) -> list[Delta]:
        """Return the deltas since the last time."""
        return self.output.take()

    def finish(self, reason: Finish, *, stop_string: bool = False, named: bool = False) -> Finish:
        """End the choice and return the reason to report.

        stop_string: a stop string of the client cut the text. named: the client forced one tool.
        """
        self.machine.end(cut=stop_string or reason is not Finish.STOP)
        self.output.end()
        if reason is not Finish.STOP or named or self.calls.is_open:
            return reason
        return Finish.TOOL_CALLS if self.output.calls else Finish.STOP

    def close_reasoning(self) -> None:
        """Reasoning is over, by its closer or by a call."""
        self.output.end_reasoning()
        self.reasoning_closed = True

    def outer_markers(self, *, in_reasoning: bool) -> MarkerSet:
        """Return the markers of text outside of calls."""
        marks = [marker(text, text) for text in self.setup.dropped]
        if self.setup.reasoning:
            marks += [marker(THINK_OPEN, THINK_OPEN), marker(THINK_CLOSE, THINK_CLOSE)]
        if self.grammar:
            marks += self.grammar.openers(in_reasoning=in_reasoning)
        return marker_set(tuple(m for m in marks if m.name not in self.setup.by_id))


class _Outer(State):
    """What reasoning and content share."""

    def __init__(self, parser: StreamParser) -> None:
        self._parser = parser

    def special(self, token: Token, held: str, machine: Machine) -> None:
        """Held text may be a part of the special token."""
        if self._parser.grammar:
            token, held = self._parser.grammar.joined(token, held)
        super().special(token, held, machine)


class ReasoningState(_Outer):
    """Inside the reasoning."""

    def __init__(self, parser: StreamParser) -> None:
        super().__init__(parser)
        self.markers = parser.outer_markers(in_reasoning=True)

    def text(self, text: str) -> int:
        """Text is reasoning."""
        self._parser.output.reasoning(text)
        return len(text)

    def marker(self, token: Token) -> None:
        """The closer ends reasoning, so does a call; a second opener is dropped."""
        parser = self._parser
        if token.name == THINK_CLOSE:
            parser.close_reasoning()
            parser.machine.state = parser.content
        elif token.name == THINK_OPEN:
            return
        elif parser.grammar and not parser.grammar.open(token):
            self.text(token.text)

    def end(self, held: str, cut: bool) -> None:
        """What was held is text; newlines at the end are dropped by the output."""
        self.text(held)


class ContentState(_Outer):
    """Outside of reasoning and calls."""

    def __init__(self, parser: StreamParser) -> None:
        super().__init__(parser)
        self.markers = parser.outer_markers(in_reasoning=False)

    def text(self, text: str) -> int:
        """Text is content."""
        self._parser.output.content(text)
        return len(text)

    def marker(self, token: Token) -> None:
        """An opener of reasoning counts at the very start only; stray closers are dropped."""
        parser = self._parser
        if token.name == THINK_OPEN:
            if not (parser.reasoning_closed or parser.output.has_content or parser.output.calls):
                parser.output.before_block()
                parser.machine.state = parser.reasoning
        elif token.name == THINK_CLOSE:
            return
        elif parser.grammar and not parser.grammar.open(token):
            self.text(token.text)

    def end(self, held: str, cut: bool) -> None:
        """What was held is text."""
        if held:
            self.text(held)
