"""Finding markers in streamed text, holding back no more than what may still become one.

A marker is a sequence of small regular expressions. From it two things are made: the expression of
the whole marker and that of every proper prefix at the end of the text. The first match of either
in the text decides: text before it is free, a whole marker is taken, a prefix is held.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

_HELD = "held"
_HELD_AT_LINE = "held_at_line"


@dataclass(frozen=True, slots=True)
class Element:
    """One step of a marker: a regular expression without groups, captured under `capture`."""

    regex: str
    capture: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Marker:
    """A structural marker, made by `marker` and compared by identity: a quick key of compiled sets.

    line_start: only legal as the first thing of a line.
    special_follows: never complete by itself; held whole because a special token may follow.
    """

    name: str
    elements: tuple[Element, ...]
    line_start: bool = False
    special_follows: bool = False


@dataclass(slots=True)
class Token:
    """A marker that was found: its name, its exact text and the captured parts."""

    name: str
    text: str
    parts: dict[str, str] = field(default_factory=dict)


@lru_cache(maxsize=1024)
def marker(
    name: str,
    *pieces: str | Element,
    line_start: bool = False,
    special_follows: bool = False,
) -> Marker:
    """Return the marker of literal strings and elements, in order; equal calls, same object."""
    elements: list[Element] = []
    for piece in pieces:
        if isinstance(piece, Element):
            elements.append(piece)
        else:
            elements.extend(Element(re.escape(char)) for char in piece)
    return Marker(name, tuple(elements), line_start, special_follows)


def _whole(index: int, mark: Marker, line: str) -> str:
    parts = [
        f"(?P<m{index}_{e.capture}>{e.regex})" if e.capture else e.regex for e in mark.elements
    ]
    return f"(?P<m{index}>{line if mark.line_start else ''}{''.join(parts)})"


def _prefixes(mark: Marker) -> str:
    """Return the expression of all non-empty prefixes of a marker that reach the end of the text.

    The last element is left out, unless a special token has to follow.
    """
    elements = mark.elements if mark.special_follows else mark.elements[:-1]
    nested = ""
    for element in reversed(elements[1:]):
        nested = f"(?:{element.regex}{nested})?"
    return f"{elements[0].regex}{nested}\\Z" if elements else ""


def _compile(markers: Sequence[Marker], line: str) -> re.Pattern[str]:
    whole = [_whole(i, m, line) for i, m in enumerate(markers) if not m.special_follows]
    groups = [whole]
    for name, at_line in ((_HELD, False), (_HELD_AT_LINE, True)):
        prefixes = [_prefixes(m) for m in markers if m.line_start == at_line]
        joined = "|".join(dict.fromkeys(p for p in prefixes if p))
        if joined:
            groups.append([f"(?P<{name}>{line if at_line else ''}(?:{joined}))"])
    return re.compile("|".join(part for group in groups for part in group))


class MarkerSet:
    """The markers that are legal in one state. Immutable."""

    def __init__(self, markers: Sequence[Marker]) -> None:
        self._markers = tuple(markers)
        self._leads = "".join(
            dict.fromkeys(re.sub(r"\\(.)", r"\1", m.elements[0].regex) for m in markers)
        )
        # The start of the text is the start of a line in the first form only.
        self._at_line = _compile(self._markers, r"(?<![^\n])") if markers else None
        self._in_line = _compile(self._markers, r"(?<=\n)") if markers else None

    def search(self, text: str, line_start: bool) -> re.Match[str] | None:
        """Return the first whole marker or held prefix; None when all of the text is free.

        line_start: whether the text begins a line.
        """
        for lead in self._leads:
            if lead in text:
                pattern = self._at_line if line_start else self._in_line
                return pattern.search(text) if pattern else None
        return None

    @staticmethod
    def is_held(match: re.Match[str]) -> bool:
        """Return whether a match is a prefix that has to wait for more text."""
        return match.lastgroup in (_HELD, _HELD_AT_LINE)

    def token(self, match: re.Match[str]) -> Token:
        """Return the marker of a whole match."""
        group = match.lastgroup or ""
        index = int(group[1:])
        captures = [e.capture for e in self._markers[index].elements if e.capture]
        parts = {capture: match.group(f"{group}_{capture}") for capture in captures}
        return Token(self._markers[index].name, match.group(), parts)


@lru_cache(maxsize=256)
def marker_set(markers: tuple[Marker, ...]) -> MarkerSet:
    """Return the compiled set of some markers, shared between streams."""
    return MarkerSet(markers)
