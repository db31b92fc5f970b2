"""Tool calls of the GLM family (`glm45`, `glm47`).

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>

Every tag is one token of the vocabulary. Names and keys are trimmed, values are not.
"""

from __future__ import annotations

import re

from services.tokenizer.parsing.lexer import Marker, Token, marker
from services.tokenizer.parsing.machine import State
from services.tokenizer.parsing.parser import THINK_CLOSE, THINK_OPEN, StreamParser, ToolGrammar
from services.tokenizer.parsing.suspended import Suspended

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"

_MARKERS = {
    text: marker(text, text)
    for text in (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END, THINK_OPEN, THINK_CLOSE)
}
_ALL = tuple(_MARKERS.values())
_NAME = re.compile(r"[^\s<>]{1,256}")
# Longer text between the tags is no name and no key.
_MAX_NAME = 256
_MAX_KEY = 1024


class GlmGrammar(ToolGrammar):
    """States of one choice's tool calls."""

    specials = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)

    def __init__(self, parser: StreamParser) -> None:
        super().__init__(parser)
        self.name = _Name(self)
        self.between = _Between(self)
        self.key = _Key(self)
        self.behind_key = _BehindKey(self)
        self.value = _Value(self)

    def openers(self, *, in_reasoning: bool) -> tuple[Marker, ...]:
        """A call opens anywhere; stray tags are dropped."""
        return tuple(_MARKERS[text] for text in self.specials)

    def open(self, token: Token) -> bool:
        """Enter a call."""
        if token.name == OPEN:
            parser = self.parser
            if parser.in_reasoning:
                parser.close_reasoning()
            parser.output.before_block()
            self.begin_call()
        return True

    def go(self, state: State) -> None:
        """Move the machine to a state."""
        self.parser.machine.state = state

    def begin_call(self) -> None:
        """A call opens; one that was left open is closed."""
        self.parser.calls.end(closed=False)
        self.name.reset()
        self.go(self.name)

    def leave(self) -> None:
        """The call is closed: back to content."""
        self.parser.calls.end()
        self.parser.output.after_block()
        self.go(self.parser.content)

    def begin_value(self, key: str) -> None:
        """The value of a key begins; one without a key is dropped."""
        if key:
            self.parser.calls.begin_value(key)
        self.value.reset()
        self.go(self.value)

    def split_name(self, text: str) -> tuple[str, str]:
        """Return the tool's name and the key that follows it without its opener.

        The longest declared name that begins the text counts, if the text as a whole is none.
        """
        tools = self.parser.setup.tools
        if text in tools or self.parser.setup.strict:
            return text, ""
        name = max((n for n in tools.names() if n and text.startswith(n)), key=len, default=text)
        return name, text[len(name) :].strip()

    def structure(self, token: Token) -> None:
        """Do what a tag means between values."""
        match token.name:
            case "<tool_call>":
                self.begin_call()
            case "</tool_call>":
                self.leave()
            case "<arg_key>":
                self.key.reset()
                self.go(self.key)
            case "<arg_value>":
                self.begin_value("")


class _Inside(State):
    """What the states between values share: text is collected up to the next tag."""

    def __init__(self, grammar: GlmGrammar) -> None:
        self._grammar = grammar
        self._text = ""
        self.markers = grammar.markers(*_ALL)

    def reset(self) -> None:
        self._text = ""

    def text(self, text: str) -> int:
        if len(self._text) <= _MAX_KEY:
            self._text += text[: _MAX_KEY + 1]
        return len(text)

    def end(self, held: str, cut: bool) -> None:
        """An open call is closed when the generation ended by itself."""
        calls = self._grammar.parser.calls
        if cut:
            calls.cut()
        else:
            calls.end(closed=False)


class _Name(_Inside):
    """Behind the opener: a name up to the next tag. What cannot be one was prose: content."""

    def text(self, text: str) -> int:
        self._text += text
        if len(self._text) > _MAX_NAME or not self._may_be_name():
            self._give_back()
        return len(text)

    def _may_be_name(self) -> bool:
        """Whether it is one word, or begins with a tool whose key follows without its tag."""
        words = self._text.split()
        tools = self._grammar.parser.setup.tools
        return len(words) < 2 or words[0] in tools

    def _give_back(self) -> None:
        """The text behind the opener is content."""
        text, self._text = self._text, ""
        parser = self._grammar.parser
        parser.calls.refused += 1
        self._grammar.go(parser.content)
        parser.output.content(text)

    def marker(self, token: Token) -> None:
        name = self._text.strip()
        match token.name:
            case "<think>" | "</think>":
                return
            case "</arg_key>":
                name, key = self._grammar.split_name(name)
                self._begin(name)
                self._grammar.behind_key.begin(key)
                self._grammar.go(self._grammar.behind_key)
            case "</arg_value>" | "<arg_value>" if not name:
                return
            case _ if name and not _NAME.fullmatch(name):
                self._give_back()
                if token.name == OPEN:
                    self._grammar.open(token)
            case _:
                self._begin(name)
                self._grammar.go(self._grammar.between)
                self._grammar.between.reset()
                self._grammar.structure(token)

    def _begin(self, name: str) -> None:
        self._grammar.parser.calls.begin(name if _NAME.fullmatch(name) else "")

    def end(self, held: str, cut: bool) -> None:
        """A name that is not complete is no call."""


class _Between(_Inside):
    """Between values. Text here is a key only if its closer follows."""

    def marker(self, token: Token) -> None:
        if token.name == KEY_END:
            self._grammar.behind_key.begin(self._text.strip())
            self._grammar.go(self._grammar.behind_key)
        elif token.name != VALUE_END:
            self._grammar.structure(token)
        self.reset()


class _Key(_Inside):
    """Inside a key."""

    def marker(self, token: Token) -> None:
        key = self._text.strip()
        match token.name:
            case "</arg_key>":
                self._grammar.behind_key.begin(key)
                self._grammar.go(self._grammar.behind_key)
            case "<arg_value>":
                self._grammar.begin_value(key)
            case "<tool_call>" | "</tool_call>" | "<arg_key>":
                self._grammar.structure(token)


class _BehindKey(State):
    """Between a key and its value, whose opener may be missing."""

    def __init__(self, grammar: GlmGrammar) -> None:
        self._grammar = grammar
        self._key = ""
        self.markers = grammar.markers(*_ALL)

    def begin(self, key: str) -> None:
        self._key = key if len(key) <= _MAX_KEY else ""

    def text(self, text: str) -> int:
        blank = len(text) - len(text.lstrip())
        if blank < len(text):
            strict = self._grammar.parser.setup.strict
            self._grammar.begin_value("" if strict else self._key)
        return blank

    def marker(self, token: Token) -> None:
        match token.name:
            case "<arg_value>":
                self._grammar.begin_value(self._key)
            case "</arg_value>":
                self._grammar.begin_value(self._key)
                self._grammar.value.close()
            case "<tool_call>" | "</tool_call>" | "<arg_key>":
                self._grammar.between.reset()
                self._grammar.structure(token)

    def end(self, held: str, cut: bool) -> None:
        self._grammar.between.end(held, cut)


class _Value(State):
    """Inside a value, which its closer alone ends.

    The closer of the call is suspended with what follows: a later closer of the value shows that it
    was literal, the end of the generation or a new call that it was not.
    """

    def __init__(self, grammar: GlmGrammar) -> None:
        self._grammar = grammar
        self._suspended = Suspended()
        self.markers = grammar.markers(*(_MARKERS[text] for text in (OPEN, CLOSE, VALUE_END)))

    def reset(self) -> None:
        self._suspended = Suspended()

    def text(self, text: str) -> int:
        if not self._suspended:
            self._grammar.parser.calls.value_text(text)
        elif text:
            self._suspend(text)
        return len(text)

    def marker(self, token: Token) -> None:
        match token.name:
            case "</arg_value>":
                self._release()
                self.close()
            case "</tool_call>":
                self._suspend(token)
            case "<tool_call>" if self._suspended and self._suspended.blank_behind:
                self.reset()
                self._grammar.parser.calls.end_value()
                self._grammar.structure(token)
            case _ if self._suspended:
                self._suspend(token)
            case _:
                self._grammar.parser.calls.value_text(token.text)

    def _suspend(self, item: Token | str) -> None:
        if not self._suspended.add(item):
            self._release()

    def close(self) -> None:
        """The value is complete."""
        self._grammar.parser.calls.end_value()
        self._grammar.between.reset()
        self._grammar.go(self._grammar.between)

    def _release(self) -> None:
        self._grammar.parser.calls.value_text(self._suspended.take_text())

    def end(self, held: str, cut: bool) -> None:
        if self._suspended and not cut:
            suspended = self._suspended
            self.reset()
            self._grammar.leave()
            suspended.replay(self._grammar.parser, held)
            return
        if self._suspended and self._suspended.blank_behind and not held.strip():
            self.reset()
        self._release()
        self._grammar.parser.calls.value_text(held)
        self._grammar.between.end("", cut)
