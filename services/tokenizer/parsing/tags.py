"""Tags with attributes, read character by character: ` invoke name="f"/>` behind an opener."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

# Longer tags are none: names of tools and parameters have at most 256 characters.
MAX_TAG_CHARS = 640
_BLANK = " \t\r\n"
_QUOTES = "\"'"


class _At(Enum):
    START = auto()
    WORD = auto()
    BETWEEN = auto()
    ATTRIBUTE = auto()
    EQUALS = auto()
    VALUE = auto()
    QUOTED = auto()
    BARE = auto()
    SLASH = auto()


@dataclass(slots=True)
class Tag:
    """A tag that is complete: its word, its attributes, and whether it closes itself."""

    word: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    empty: bool = False


class BrokenTagError(Exception):
    """The text cannot become a tag."""


class TagReader:
    """Reads one tag, cut anywhere. `text` is what has been taken of it so far."""

    def __init__(self) -> None:
        self.text = ""
        self._tag = Tag()
        self._at = _At.START
        self._name = self._value = self._quote = ""

    def read(self, text: str) -> tuple[int, Tag | None]:
        """Take text up to the end of the tag; return the characters taken and the whole tag.

        Raises BrokenTagError at the first character that fits no tag; `text` is then all that was
        taken before it, and no character of this call counts as taken beyond those.
        """
        for index, char in enumerate(text):
            if char == ">" and self._at is not _At.QUOTED:
                self._finish()
                self.text += text[: index + 1]
                return index + 1, self._tag
            if len(self.text) + index >= MAX_TAG_CHARS or not self._step(char):
                self.text += text[:index]
                raise BrokenTagError
        self.text += text
        return len(text), None

    def _finish(self) -> None:
        if self._at in (_At.BARE, _At.ATTRIBUTE):
            self._keep()

    def _keep(self) -> None:
        self._tag.attributes.setdefault(self._name, self._value)
        self._name = self._value = ""

    def _step(self, char: str) -> bool:
        """Take one character; return whether it fits."""
        if char == "<":
            return False
        match self._at:
            case _At.START | _At.WORD:
                return self._in_word(char)
            case _At.BETWEEN | _At.ATTRIBUTE | _At.EQUALS:
                return self._in_attribute(char)
            case _At.VALUE | _At.QUOTED | _At.BARE:
                return self._in_value(char)
        return char in _BLANK

    def _in_word(self, char: str) -> bool:
        if char.isalnum() or char in "_-":
            self._at = _At.WORD
            self._tag.word += char
            return True
        if self._at is _At.START:
            return char in _BLANK
        return self._behind(char)

    def _behind(self, char: str) -> bool:
        """Take a character behind a word or a value."""
        if char == "/":
            self._tag.empty = True
            self._at = _At.SLASH
        elif char in _BLANK:
            self._at = _At.BETWEEN
        else:
            return False
        return True

    def _in_attribute(self, char: str) -> bool:
        if char.isalnum() or char in "_-":
            if self._at is _At.EQUALS:
                self._keep()
            self._at = _At.ATTRIBUTE
            self._name += char
            return True
        if char == "=" and self._at is not _At.BETWEEN:
            self._at = _At.VALUE
            return True
        if self._at is _At.BETWEEN:
            return self._behind(char)
        if char in _BLANK:
            self._at = _At.EQUALS
            return True
        self._keep()
        return self._behind(char)

    def _in_value(self, char: str) -> bool:
        if self._at is _At.VALUE:
            if char in _QUOTES:
                self._quote, self._at = char, _At.QUOTED
                return True
            if char in _BLANK:
                return True
            self._at = _At.BARE
        if self._at is _At.QUOTED:
            return self._in_quotes(char)
        if char in _BLANK or char == "/":
            self._keep()
            return self._behind(char)
        self._value += char
        return True

    def _in_quotes(self, char: str) -> bool:
        if char == self._quote:
            self._keep()
            self._at = _At.BETWEEN
            return True
        self._value += char
        return char != "\n"
