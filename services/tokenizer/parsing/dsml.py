"""Tool calls of the DeepSeek V4 and V4.1 families (`deepseek_v4`, `deepseek_v41`).

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">TEXT</｜DSML｜parameter>
    <｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

V4.1 writes `<｜DSML｜ calls>` and a space in front of every word; both spellings are read in both
families. The mark between the bars is one token, so markup and text cannot be mistaken for each
other; the rest of a tag is ordinary text.
"""

from __future__ import annotations

from services.tokenizer.parsing.lexer import Marker, Token, marker
from services.tokenizer.parsing.machine import Machine, State
from services.tokenizer.parsing.parser import THINK_CLOSE, THINK_OPEN, StreamParser, ToolGrammar
from services.tokenizer.parsing.tags import BrokenTagError, Tag, TagReader

MARK = "｜DSML｜"
TAG, END_TAG = "dsml_tag", "dsml_end_tag"
INVOKE, PARAMETER = "invoke", "parameter"
# What the families call a block of calls. Other words are corrupt spellings of these.
BLOCK_WORDS = ("tool_calls", "calls")

_MARKS = (marker(TAG, "<" + MARK), marker(END_TAG, "</" + MARK))
_MARKS_BY_ID = (
    marker(TAG, "<", special_follows=True),
    marker(END_TAG, "</", special_follows=True),
)
_THINK = (marker(THINK_OPEN, THINK_OPEN), marker(THINK_CLOSE, THINK_CLOSE))


class DsmlGrammar(ToolGrammar):
    """States of one choice's tool calls."""

    specials = (MARK,)

    def __init__(self, parser: StreamParser) -> None:
        super().__init__(parser)
        self.tag = _Tag(self)
        self.block = _Block(self)
        self.behind = _Behind(self)
        self.body = _Body(self)
        self.json_body = _JsonBody(self)
        self.value = _Value(self)
        self._called = False

    @property
    def marks(self) -> tuple[Marker, ...]:
        """The beginnings of tags."""
        return _MARKS_BY_ID if MARK in self.parser.setup.by_id else _MARKS

    def openers(self, *, in_reasoning: bool) -> tuple[Marker, ...]:
        """A tag may begin anywhere; what it means is known when it is complete."""
        return self.marks

    def open(self, token: Token) -> bool:
        """Begin to read a tag."""
        self.read_tag(token)
        return True

    def joined(self, token: Token, held: str) -> tuple[Token, str]:
        """Put the mark and the "<" or "</" in front of it together."""
        if token.text != MARK:
            return token, held
        for name, lead in ((END_TAG, "</"), (TAG, "<")):
            if held.endswith(lead):
                return Token(name, lead + MARK), held[: -len(lead)]
        return Token(TAG, MARK), held

    def go(self, state: State) -> None:
        """Move the machine to a state."""
        self.parser.machine.state = state

    def read_tag(self, token: Token) -> None:
        """Read the rest of a tag on behalf of the current state."""
        self.tag.begin(self.parser.machine.state, closing=token.name == END_TAG)
        self.go(self.tag)

    def opened(self, tag: Tag, back: State) -> None:
        """A tag opens something."""
        match tag.word:
            case "invoke":
                self._begin_invoke(tag, back)
            case "parameter" if back in (self.body, self.value, self.json_body):
                self._begin_value(tag, back)
            case "parameter":
                self.go(back)
            case _:
                self._open_block(tag, back)

    def _open_block(self, tag: Tag, back: State) -> None:
        if self.parser.setup.strict and tag.word not in BLOCK_WORDS:
            self.parser.calls.refused += 1
            self.go(back)
            return
        self._leave_text(back)
        self.parser.calls.end(closed=False)
        self.go(self.behind if tag.empty else self.block)

    def _begin_invoke(self, tag: Tag, back: State) -> None:
        bare = back in (self.parser.reasoning, self.parser.content, self.behind)
        name = tag.attributes.get("name", "").strip()
        if bare and self.parser.setup.strict:
            name = ""
        self._leave_text(back)
        calls = self.parser.calls
        calls.end(closed=False)
        calls.begin(name, provisional=bare)
        self._called = self._called or bool(name)
        if tag.empty:
            self.end_invoke()
        else:
            self.body.reset()
            self.go(self.body)

    def _leave_text(self, back: State) -> None:
        parser = self.parser
        if back is parser.reasoning:
            parser.close_reasoning()
        if back in (parser.reasoning, parser.content):
            parser.output.before_block()
            self._called = False

    def _begin_value(self, tag: Tag, back: State) -> None:
        calls = self.parser.calls
        if back is self.value:
            calls.end_value(closed=False)
        key = tag.attributes.get("name", "").strip()
        self.go(self.body)
        if key:
            as_json = tag.attributes.get("string", "false").strip().lower() != "true"
            calls.begin_value(key, as_json=as_json, unwrap=not self.parser.setup.strict)
            self.body.has_values = True
        if tag.empty:
            calls.end_value()
        else:
            self.go(self.value)

    def closed(self, tag: Tag, back: State) -> None:
        """A tag closes something."""
        match tag.word:
            case "parameter":
                if back is self.value:
                    self.parser.calls.end_value()
                    back = self.body
                self.go(back)
            case "invoke":
                if back in (self.body, self.value, self.json_body):
                    self.end_invoke(body=back is self.json_body)
                else:
                    self.go(back)
            case _:
                self._close_block(back)

    def end_invoke(self, *, body: bool = False) -> None:
        """The call is closed. body: its arguments are one JSON object."""
        if body:
            self.parser.calls.whole(self.json_body.take())
        self.parser.calls.end()
        self.go(self.block)

    def _close_block(self, back: State) -> None:
        """A block is closed; a stray closer is dropped."""
        parser = self.parser
        if back in (parser.reasoning, parser.content, self.behind):
            self.go(back)
            return
        if back is self.json_body:
            parser.calls.whole(self.json_body.take())
        parser.calls.end(closed=False)
        if self._called:
            self.go(self.behind)
        else:
            parser.output.after_block()
            self.go(parser.content)


class _Tag(State):
    """Inside a tag, behind its mark. Text that fits no tag belongs to the state in front."""

    def __init__(self, grammar: DsmlGrammar) -> None:
        self._grammar = grammar
        self._reader = TagReader()
        self._back: State = self
        self._closing = False
        self.markers = grammar.markers()

    def begin(self, back: State, *, closing: bool) -> None:
        self._reader = TagReader()
        self._back, self._closing = back, closing

    def text(self, text: str) -> int:
        before = len(self._reader.text)
        try:
            taken, tag = self._reader.read(text)
        except BrokenTagError:
            self._give_up()
            return len(self._reader.text) - before
        if tag is not None:
            if self._closing:
                self._grammar.closed(tag, self._back)
            else:
                self._grammar.opened(tag, self._back)
        return taken

    def _give_up(self) -> None:
        self._grammar.parser.calls.refused += 1
        self._grammar.go(self._back)
        if self._reader.text:
            self._back.text(self._reader.text)

    def marker(self, token: Token) -> None:
        """A special token inside a tag: the tag is broken."""
        self._give_up()
        self._grammar.parser.machine.state.special(token, "", self._grammar.parser.machine)

    def end(self, held: str, cut: bool) -> None:
        """An incomplete tag is dropped."""
        self._grammar.go(self._back)
        self._back.end("", cut)


class _Inside(State):
    """What the states inside a block share: tags are read, other special tokens dropped."""

    def __init__(self, grammar: DsmlGrammar) -> None:
        self._grammar = grammar
        self.markers = grammar.markers(*grammar.marks, *_THINK)

    def special(self, token: Token, held: str, machine: Machine) -> None:
        token, held = self._grammar.joined(token, held)
        super().special(token, held, machine)

    def text(self, text: str) -> int:
        return len(text)

    def marker(self, token: Token) -> None:
        if token.name in (TAG, END_TAG):
            self._grammar.read_tag(token)

    def end(self, held: str, cut: bool) -> None:
        """An open call is closed when the generation ended by itself."""
        calls = self._grammar.parser.calls
        if not calls.is_open:
            return
        if cut:
            calls.cut()
        else:
            calls.end(closed=False)


class _Block(_Inside):
    """Inside a block, between calls: text is dropped."""


class _Behind(_Inside):
    """Behind a block with calls: text is dropped, a second block adds calls."""


class _Body(_Inside):
    """Inside a call, between parameters. A "{" in front of all parameters begins a JSON object."""

    def __init__(self, grammar: DsmlGrammar) -> None:
        super().__init__(grammar)
        self.has_values = False

    def reset(self) -> None:
        self.has_values = False

    def text(self, text: str) -> int:
        blank = len(text) - len(text.lstrip())
        strict = self._grammar.parser.setup.strict
        if blank < len(text) and text[blank] == "{" and not self.has_values and not strict:
            self._grammar.json_body.reset()
            self._grammar.go(self._grammar.json_body)
            return blank
        self.has_values = self.has_values or blank < len(text)
        return len(text)


class _JsonBody(_Inside):
    """Inside a call whose arguments are one JSON object. They are given out when it is closed."""

    def __init__(self, grammar: DsmlGrammar) -> None:
        super().__init__(grammar)
        self._pieces: list[str] = []

    def reset(self) -> None:
        self._pieces = []

    def take(self) -> str:
        """Return the object's text."""
        pieces, self._pieces = self._pieces, []
        return "".join(pieces)

    def text(self, text: str) -> int:
        self._pieces.append(text)
        return len(text)

    def end(self, held: str, cut: bool) -> None:
        if not cut:
            self._grammar.parser.calls.whole(self.take() + held)
        super().end(held, cut)


class _Value(_Inside):
    """Inside a parameter's value: only tags end it, other special tokens are text."""

    def __init__(self, grammar: DsmlGrammar) -> None:
        super().__init__(grammar)
        self.markers = grammar.markers(*grammar.marks)

    def text(self, text: str) -> int:
        self._grammar.parser.calls.value_text(text)
        return len(text)

    def marker(self, token: Token) -> None:
        if token.name in (TAG, END_TAG):
            self._grammar.read_tag(token)
        else:
            self._grammar.parser.calls.value_text(token.text)

    def end(self, held: str, cut: bool) -> None:
        self._grammar.parser.calls.value_text(held)
        super().end(held, cut)
