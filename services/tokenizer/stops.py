"""Stop strings in streamed text.

The match that is complete first wins, the longest of those that end at the same character. This
does not depend on how the text is cut. Text is held back only while its end is the beginning of a
stop string (Aho-Corasick automaton: the depth of its state is what is held).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found: its place in the list and its length in characters."""

    index: int
    length: int


class StopAutomaton:
    """Reads characters, one state per distinct beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._edges: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[StopMatch | None] = [None]
        for index, stop in enumerate(stops):
            self._insert(index, stop)
        self._fail = self._failures()
        self._first = re.compile("|".join(re.escape(char) for char in self._edges[0]))
        self.state = 0

    def _insert(self, index: int, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._edges[state].get(char)
            if following is None:
                following = len(self._edges)
                self._edges[state][char] = following
                self._edges.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = following
        self._found[state] = self._found[state] or StopMatch(index, len(stop))

    def _failures(self) -> list[int]:
        fail = [0] * len(self._edges)
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._edges[state].items():
                back = fail[state]
                while back and char not in self._edges[back]:
                    back = fail[back]
                fail[following] = self._edges[back].get(char, 0)
                self._found[following] = self._found[following] or self._found[fail[following]]
                queue.append(following)
        return fail

    @property
    def depth(self) -> int:
        """Characters at the end of the text that may still become a stop string."""
        return self._depth[self.state]

    def read(self, text: str) -> tuple[int, StopMatch] | None:
        """Read text up to the first match; return the characters read and the match."""
        state, position, edges = self.state, 0, self._edges
        while position < len(text):
            if not state:
                start = self._first.search(text, position)
                if start is None:
                    break
                position = start.start()
            char = text[position]
            position += 1
            while state and char not in edges[state]:
                state = self._fail[state]
            state = edges[state].get(char, 0)
            found = self._found[state]
            if found is not None:
                self.state = state
                return position, found
        self.state = state
        return None


@dataclass(slots=True)
class Piece:
    """Text of one token. `special` marks a token that the parser takes whole; `tokens` is 0 for
    the first part of a divided one."""

    text: str
    special: bool = False
    tokens: int = 0


class StopFilter:
    """Lets pieces through up to a stop string, holding as little as possible."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._automaton = StopAutomaton(stops)
        self._include_stop = include_stop
        self._held: deque[Piece] = deque()
        self._held_chars = 0
        self.matched: int | None = None

    def push(self, piece: Piece) -> list[Piece]:
        """Return the pieces that are free now. After a match nothing more may be pushed.

        A special token of which only a part is free is held, or dropped at a match.
        """
        self._held.append(piece)
        self._held_chars += len(piece.text)
        found = self._automaton.read(piece.text)
        if found is None:
            return self._take(self._held_chars - self._automaton.depth)
        read, match = found
        self.matched = match.index
        end = self._held_chars - len(piece.text) + read
        return self._take(end if self._include_stop else end - match.length)

    def flush(self) -> list[Piece]:
        """Return what was held; the text is at its end."""
        return [] if self.matched is not None else self._take(self._held_chars)

    def _take(self, chars: int) -> list[Piece]:
        taken: list[Piece] = []
        while self._held:
            piece = self._held[0]
            if len(piece.text) > chars:
                if not piece.special:
                    taken.append(Piece(piece.text[:chars]))
                    self._held[0] = Piece(piece.text[chars:], tokens=piece.tokens)
                    self._held_chars -= chars
                break
            self._held.popleft()
            taken.append(piece)
            chars -= len(piece.text)
            self._held_chars -= len(piece.text)
        return taken
