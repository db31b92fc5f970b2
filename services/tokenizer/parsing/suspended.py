"""Closers inside an open value of which only what follows can tell whether they are literal."""

from __future__ import annotations

from services.tokenizer.parsing.lexer import Token
from services.tokenizer.parsing.parser import StreamParser

# Text kept behind a closer of which it is not yet known whether it is literal.
MAX_SUSPENDED = 1024


class Suspended:
    """A closer and what came behind it, up to a bound. Empty when nothing is in doubt."""

    def __init__(self) -> None:
        self._items: list[Token | str] = []
        self._chars = 0

    def __bool__(self) -> bool:
        return bool(self._items)

    def add(self, item: Token | str) -> bool:
        """Keep a closer or what follows it; return False when it has become too much."""
        self._items.append(item)
        self._chars += len(item if isinstance(item, str) else item.text)
        return self._chars <= MAX_SUSPENDED

    @property
    def blank_behind(self) -> bool:
        """Whether only white space follows the closer."""
        return all(isinstance(item, str) and not item.strip() for item in self._items[1:])

    def take(self) -> list[Token | str]:
        """Return all that is kept, the closer first, and keep nothing."""
        items, self._items = self._items, []
        self._chars = 0
        return items

    def take_text(self) -> str:
        """Return all that is kept as text, because it was literal."""
        return "".join(item if isinstance(item, str) else item.text for item in self.take())

    def replay(self, parser: StreamParser, held: str) -> None:
        """Parse what is behind the closer, which was real, up to the end of the generation."""
        behind = self.take()[1:]
        machine = parser.machine
        for item in behind:
            if isinstance(item, str):
                machine.feed(item)
            elif item.name in parser.setup.by_id:
                machine.special(item)
            else:
                machine.feed(item.text)
        machine.feed(held)
        machine.end(cut=False)
