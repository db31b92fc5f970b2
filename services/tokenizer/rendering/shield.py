"""Keeps control tokens that users wrote apart from those of the template.

Templates look at content (strip it, test it, put it in JSON), so user text must go through them
almost unchanged. Before rendering, each character with which a control token can begin or end is
replaced, one for one, by a private-use character that occurs nowhere in the conversation; a string
that is the inside of a control token (so that a template could complete it) is replaced whole.
After rendering, every control token in the text is therefore the template's own; the prompt is
split at them, and the private characters turn back into what the user wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]")
# Planes 16 and 15 and the old area, highest first: two code points per plane are no characters.
_RANGES = ((0x100000, 0x10FFFD), (0xF0000, 0xFFFFD), (0xE000, 0xF8FF))
# Words of requests and JSON schemas that templates compare with; never the inside of a token that
# a template would complete.
_KEPT = frozenset(
    (
        *("system", "user", "assistant", "tool", "developer", "role", "content", "text", "image"),
        *("video", "type", "function", "name", "description", "parameters", "properties"),
        *("required", "items", "enum", "arguments", "string", "integer", "number", "boolean"),
        *("object", "array", "null"),
    )
)


class ShieldExhaustedError(ValueError):
    """The conversation uses all private-use characters."""


class Shield:
    """The replacement for one conversation."""

    def __init__(self, control: Iterable[str], texts: Iterable[str]) -> None:
        """control: texts of the control tokens. texts: all that users wrote.

        Raises ShieldExhaustedError.
        """
        control = list(control)
        edges = {text[0] for text in control} | {text[-1] for text in control}
        inner = {char for text in control for char in text}
        foreign = (text for text in texts if not text.isascii())
        used = {char for text in foreign for char in _PRIVATE.findall(text)}
        free = _unused(used)
        try:
            self.end_mark = next(free)
            whole = {char: next(free) for char in sorted(inner)}
        except StopIteration:
            raise ShieldExhaustedError("too many private-use characters") from None
        self._edges = [(char, whole[char]) for char in sorted(edges)]
        self._whole = str.maketrans(whole)
        self._back = str.maketrans({private: char for char, private in whole.items()})
        self._privates = re.compile(f"[{''.join(whole.values())}]") if whole else None
        self._insides = frozenset(part for text in control for part in _insides(text)) - _KEPT

    def text(self, text: str) -> str:
        """Return user text that cannot be or complete a control token."""
        if text.strip() in self._insides:
            return text.translate(self._whole)
        for char, private in self._edges:
            if char in text:
                text = text.replace(char, private)
        return text

    def value(self, value: Any) -> Any:
        """Return a JSON value with all its strings and keys shielded."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {self.text(str(key)): self.value(item) for key, item in value.items()}
            case list() | tuple():
                return [self.value(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        """Return text as the user wrote it."""
        if text.isascii() or self._privates is None or not self._privates.search(text):
            return text
        return text.translate(self._back)


def strings_in(value: Any) -> Iterator[str]:
    """Yield every string and key of a JSON value."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield str(key)
                yield from strings_in(item)
        case list() | tuple():
            for item in value:
                yield from strings_in(item)


def _unused(used: set[str]) -> Iterator[str]:
    for first, last in _RANGES:
        for code in range(last, first - 1, -1):
            if chr(code) not in used:
                yield chr(code)


def _insides(text: str) -> Iterator[str]:
    """Yield what is left of a control token without some of the punctuation around it."""
    first = next((i for i, char in enumerate(text) if char.isalnum()), len(text))
    last = next((i for i, char in enumerate(reversed(text)) if char.isalnum()), len(text))
    for start in range(first + 1):
        for end in range(len(text) - last, len(text) + 1):
            part = text[start:end].strip()
            if part and part != text:
                yield part
