"""The machine that all families share: text and special tokens through states."""

from __future__ import annotations

from abc import ABC, abstractmethod

from services.tokenizer.parsing.lexer import MarkerSet, Token

# Text is looked at in windows of this many characters, which bounds the copying per marker.
_WINDOW = 4096


class State(ABC):
    """One state of a grammar. Its methods may move the machine to another state."""

    markers: MarkerSet

    @abstractmethod
    def text(self, text: str) -> int:
        """Take free text and return how many characters were taken: at least one, or the state
        has changed."""

    @abstractmethod
    def marker(self, token: Token) -> None:
        """Take a marker that is legal here, or any special token (`token.text` is its text)."""

    @abstractmethod
    def end(self, held: str, cut: bool) -> None:
        """Take the end of the generation.

        held: text that was waiting to become a marker. cut: the generation did not end by itself.
        """

    def special(self, token: Token, held: str, machine: Machine) -> None:
        """Take a special token behind held text, which by then is free text."""
        machine.release(held)
        machine.state.marker(token)


class Machine:
    """Runs states over a stream. The same stream gives the same calls however it is cut."""

    def __init__(self, state: State, dropped: frozenset[str] = frozenset()) -> None:
        """dropped: names of markers that are left out of the text, whatever the state."""
        self.state = state
        self._dropped = dropped
        self._held = ""
        self._line_start = True

    def feed(self, text: str) -> None:
        """Take ordinary text, cut anywhere."""
        if len(text) <= _WINDOW:
            self._feed(text)
            return
        for start in range(0, len(text), _WINDOW):
            self._feed(text[start : start + _WINDOW])

    def _feed(self, text: str) -> None:
        text = self._held + text if self._held else text
        self._held = ""
        while text:
            markers = self.state.markers
            match = markers.search(text, self._line_start)
            if match is None:
                text = self._free(text, len(text))
            elif match.start():
                text = self._free(text, match.start())
            elif markers.is_held(match):
                self._held = text
                return
            else:
                token = markers.token(match)
                text = text[match.end() :]
                if token.name not in self._dropped:
                    self._line_start = True
                    self.state.marker(token)

    def _free(self, text: str, length: int) -> str:
        """Give the state up to `length` characters of free text; return what is left over."""
        taken = self.state.text(text if length == len(text) else text[:length])
        if taken:
            self._line_start = text[taken - 1] == "\n"
        return text[taken:]

    def special(self, token: Token) -> None:
        """Take a special token that is structural for the grammar."""
        held, self._held = self._held, ""
        before = self.state
        before.special(token, held, self)
        self._line_start = self.state is not before

    def release(self, text: str) -> None:
        """Give text to the states without looking for markers in it."""
        while text:
            text = self._free(text, len(text))

    def end(self, cut: bool) -> None:
        """Take the end of the generation; nothing may follow."""
        held, self._held = self._held, ""
        self.state.end(held, cut)
