"""Tool calls of the Qwen3.8 family (`qwen3_xml`).

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

One newline at each end of a value belongs to the markup. Missing closers are repaired, literal
markers inside values are kept (the rules are with the states).
"""

from __future__ import annotations

import re

from services.tokenizer.parsing.lexer import Element, Marker, Token, marker
from services.tokenizer.parsing.machine import Machine, State
from services.tokenizer.parsing.parser import THINK_CLOSE, THINK_OPEN, StreamParser, ToolGrammar
from services.tokenizer.parsing.suspended import Suspended

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION, FUNCTION_END = "function", "function_end"
PARAMETER, PARAMETER_END = "parameter", "parameter_end"
NAME_END = "name_end"
CALL_END = "call_end"
BARE, BARE_EMPTY = "bare", "bare_empty"

_GAP = Element(r"[ \t]{0,4}")
_SPACE = Element(r"\s{0,64}")
_NAME = Element(r"[^<>\n]{1,256}", capture="name")
_KEY = Element(r"[^<>\n]{1,256}", capture="key")
_KEY_END = Element(r"[>\n]")

_OPEN = marker(OPEN, OPEN)
_CLOSE = marker(CLOSE, CLOSE)
_THINK = (marker(THINK_OPEN, THINK_OPEN), marker(THINK_CLOSE, THINK_CLOSE))
_FUNCTION_PIECES = ("<", _GAP, "function", _GAP, "=")
_FUNCTION_END_PIECES = ("<", _GAP, "/", _GAP, "function", _GAP, ">")
_PARAMETER_PIECES = ("<", _GAP, "parameter", _GAP, "=", _KEY)
_FUNCTION = marker(FUNCTION, *_FUNCTION_PIECES)
_FUNCTION_END = marker(FUNCTION_END, *_FUNCTION_END_PIECES)
_PARAMETER = marker(PARAMETER, *_PARAMETER_PIECES, _KEY_END)
_PARAMETER_END = marker(PARAMETER_END, "<", _GAP, "/", _GAP, "parameter", _GAP, ">")
# Inside a value: a new parameter ends it only at the start of a line and with a clean key.
_NEXT_PARAMETER = marker(PARAMETER, *_PARAMETER_PIECES, ">", line_start=True)
# Inside a value: the end of the function ends it only in front of the end of the block.
_CALL_END = marker(CALL_END, *_FUNCTION_END_PIECES, _SPACE, CLOSE)
_CALL_END_HELD = marker(CALL_END, *_FUNCTION_END_PIECES, _SPACE, special_follows=True)
# In content: a call without its block, recognised by what must follow the name.
_BARE = marker(BARE, "<function=", _NAME, ">", _SPACE, "<parameter=", _KEY, ">", line_start=True)
_BARE_EMPTY = marker(BARE_EMPTY, "<function=", _NAME, ">", _SPACE, "</function>", line_start=True)

_FUNCTION_ENDED = re.compile(r"<[ \t]*/[ \t]*function[ \t]*>\s*")
_MAX_NAME = 256


class QwenGrammar(ToolGrammar):
    """States of one choice's tool calls."""

    specials = (OPEN, CLOSE)

    def __init__(self, parser: StreamParser) -> None:
        super().__init__(parser)
        self.block = _Block(self)
        self.junk = _Junk(self)
        self.name = _Name(self)
        self.body = _Body(self)
        self.value = _Value(self)
        self._wrapped = True

    def openers(self, *, in_reasoning: bool) -> tuple[Marker, ...]:
        """A block opens anywhere, a bare function in content only; stray closers are dropped."""
        return (_OPEN, _CLOSE) if in_reasoning else (_OPEN, _CLOSE, _BARE, _BARE_EMPTY)

    def open(self, token: Token) -> bool:
        """Enter a block or a bare call."""
        if token.name == OPEN:
            self._leave_text()
            self.go(self.block)
        elif token.name in (BARE, BARE_EMPTY):
            return self._open_bare(token)
        return True

    def _open_bare(self, token: Token) -> bool:
        name = token.parts["name"].strip()
        if self.parser.setup.strict or name not in self.parser.setup.tools:
            return False
        self._leave_text()
        self._wrapped = False
        self.parser.calls.begin(name)
        if token.name == BARE_EMPTY:
            self.end_function()
        else:
            self.begin_value(token.parts["key"])
        return True

    def _leave_text(self) -> None:
        parser = self.parser
        if parser.in_reasoning:
            parser.close_reasoning()
        parser.output.before_block()
        self._wrapped = True

    def go(self, state: State) -> None:
        """Move the machine to a state."""
        self.parser.machine.state = state

    def begin_name(self) -> None:
        """A function opens; one that was left open is closed."""
        self.parser.calls.end()
        self.name.reset()
        self.go(self.name)

    def begin_value(self, key: str) -> None:
        """A parameter opens. One without a key is ignored."""
        if key.strip():
            self.parser.calls.begin_value(key.strip(), trim=True)
            self.value.reset()
            self.go(self.value)
        else:
            self.go(self.body)

    def end_function(self) -> None:
        """The function is closed; the block, if there is one, goes on."""
        self.parser.calls.end()
        if self._wrapped:
            self.go(self.block)
        else:
            self.leave()

    def leave(self) -> None:
        """The block is closed: back to content."""
        self.parser.calls.end()
        self.parser.output.after_block()
        self.go(self.parser.content)

    def structure(self, token: Token) -> None:
        """Do what a marker means inside a block but outside of a value."""
        match token.name:
            case "function":
                self.begin_name()
            case "parameter":
                self.begin_value(token.parts["key"])
            case "function_end":
                self.end_function()
            case "</tool_call>":
                self.leave()
            case "<tool_call>":
                self.parser.calls.end()
                self._wrapped = True
                self.go(self.block)


class _Block(State):
    """Inside a block, outside of functions.

    Prose here means that the block was no call, or that its closer is missing: it is content.
    Anything else that begins with "<" is broken markup.
    """

    def __init__(self, grammar: QwenGrammar) -> None:
        self._grammar = grammar
        self.markers = grammar.markers(
            _FUNCTION, _FUNCTION_END, _PARAMETER_END, _OPEN, _CLOSE, *_THINK
        )

    def text(self, text: str) -> int:
        blank = len(text) - len(text.lstrip())
        if blank == len(text):
            return blank
        if text[blank] == "<":
            self._grammar.go(self._grammar.junk)
            return len(text)
        self._grammar.leave()
        return blank

    def marker(self, token: Token) -> None:
        if token.name != FUNCTION_END:
            self._grammar.structure(token)

    def end(self, held: str, cut: bool) -> None:
        """An incomplete opener is dropped."""


class _Junk(State):
    """Broken markup inside a block: dropped up to the next thing that is understood."""

    def __init__(self, grammar: QwenGrammar) -> None:
        self._grammar = grammar
        self.markers = grammar.markers(_FUNCTION, _OPEN, _CLOSE)

    def text(self, text: str) -> int:
        return len(text)

    def marker(self, token: Token) -> None:
        self._grammar.structure(token)

    def end(self, held: str, cut: bool) -> None:
        """Nothing to give out."""


class _Name(State):
    """Inside a function's name. Any structural marker ends a name that lost its ">"."""

    def __init__(self, grammar: QwenGrammar) -> None:
        self._grammar = grammar
        self._name = ""
        self.markers = grammar.markers(
            marker(NAME_END, ">"), marker(NAME_END, "\n"),
            _FUNCTION, _FUNCTION_END, _PARAMETER, _OPEN, _CLOSE, *_THINK,
        )  # fmt: skip

    def reset(self) -> None:
        self._name = ""

    def text(self, text: str) -> int:
        self._name += text
        if len(self._name) > _MAX_NAME:
            self._grammar.go(self._grammar.junk)
        return len(text)

    def marker(self, token: Token) -> None:
        if token.name in (THINK_OPEN, THINK_CLOSE):
            return
        broken = "<" in self._name  # of a marker that was not completed: no tool is called so
        self._grammar.parser.calls.begin("" if broken else self._name.strip())
        self._grammar.go(self._grammar.body)
        self._grammar.structure(token)

    def end(self, held: str, cut: bool) -> None:
        """A name that is not complete is no call."""


class _Body(State):
    """Inside a function, between parameters. Text here is dropped."""

    def __init__(self, grammar: QwenGrammar) -> None:
        self._grammar = grammar
        self.markers = grammar.markers(
            _PARAMETER, _PARAMETER_END, _FUNCTION, _FUNCTION_END, _OPEN, _CLOSE, *_THINK
        )

    def text(self, text: str) -> int:
        return len(text)

    def marker(self, token: Token) -> None:
        self._grammar.structure(token)

    def end(self, held: str, cut: bool) -> None:
        """A call that ended by itself is closed."""
        calls = self._grammar.parser.calls
        if cut:
            calls.cut()
        else:
            calls.end()


class _Value(State):
    """Inside a parameter's value.

    It ends at its closer, at the next parameter on a new line, or at the end of the function in
    front of the end of the block. An end of the block alone is suspended with what follows: a
    later closer shows that it was literal, the end of the generation or a new block that it was
    not.
    """

    def __init__(self, grammar: QwenGrammar) -> None:
        self._grammar = grammar
        self._suspended = Suspended()
        call_end = _CALL_END_HELD if CLOSE in grammar.parser.setup.by_id else _CALL_END
        self.markers = grammar.markers(_PARAMETER_END, _NEXT_PARAMETER, call_end, _OPEN, _CLOSE)

    def reset(self) -> None:
        self._suspended = Suspended()

    def text(self, text: str) -> int:
        if not self._suspended:
            self._grammar.parser.calls.value_text(text)
        elif text:
            self._suspend(text)
        return len(text)

    def special(self, token: Token, held: str, machine: Machine) -> None:
        if token.name in (OPEN, CLOSE) and _FUNCTION_ENDED.fullmatch(held):
            self._close()
            self._grammar.structure(token)
        else:
            super().special(token, held, machine)

    def marker(self, token: Token) -> None:
        match token.name:
            case "call_end":
                self._close()
                self._grammar.leave()
            case "parameter_end":
                self._close()
                self._grammar.go(self._grammar.body)
            case "parameter":
                self._close()
                self._grammar.begin_value(token.parts["key"])
            case "</tool_call>":
                self._suspend(token)
            case "<tool_call>" if self._suspended and self._suspended.blank_behind:
                self.reset()
                self._close()
                self._grammar.structure(token)
            case _:
                self._literal(token)

    def _literal(self, token: Token) -> None:
        if self._suspended:
            self._suspend(token)
        else:
            self._grammar.parser.calls.value_text(token.text)

    def _suspend(self, item: Token | str) -> None:
        if not self._suspended.add(item):
            self._release()

    def _release(self) -> None:
        """What was suspended is part of the value."""
        self._grammar.parser.calls.value_text(self._suspended.take_text())

    def _close(self) -> None:
        self._release()
        self._grammar.parser.calls.end_value()

    def end(self, held: str, cut: bool) -> None:
        if self._suspended and not cut:
            suspended = self._suspended
            self.reset()
            self._grammar.leave()
            suspended.replay(self._grammar.parser, held)
        elif _FUNCTION_ENDED.match(held):
            self._close()
            self._grammar.end_function()
        else:
            self._end_open(held, cut)

    def _end_open(self, held: str, cut: bool) -> None:
        if self._suspended and self._suspended.blank_behind and not held.strip():
            self.reset()
        self.text(held)
        self._release()
        calls = self._grammar.parser.calls
        if cut:
            calls.cut()
        else:
            calls.end()
